// Attention of one step, straight from the KV pool.
//
// A row sees the keys of its own sequence, in blocks of 32 positions that begin at multiples of 32.
// Rows that have the same slots in a block go through it together, so a shared prefix is read once.
// What a row computes, and in which order, depends on its own keys alone: its result has the same
// bits alone and in any batch, whoever computed the keys, and whatever of them is shared.
// The softmax runs along (Milakov & Gimelshein 2018; Dao et al. 2022).

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "vectors.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace stemma {
namespace {

constexpr int kBlock = 32;       // keys
constexpr int kTile = 32;        // rows that one task goes through, at most
constexpr int kMaxDim = 256;
constexpr int kMaxQueries = 256;  // of a tile: rows times query heads per KV head
constexpr float kSlack = 8;
constexpr float kNone = -1e30f;    // less than any score
constexpr float kUnseen = -2e30f;  // and the score of what a row does not see

// Rows [first, last) of the step have the same slots in a block, as far as each of them sees it.
struct Run {
  int32_t block, first, last, longest;
};

struct Plan {
  std::vector<const int32_t*> tables;  // of each row: the slots of its positions
  std::vector<int64_t> lengths;        // keys that it sees: itself and all before it
  std::vector<int64_t> starts;         // the first of these; above 0 with a sliding window
  std::vector<int64_t> slots;          // its own
  std::vector<int32_t> tile_rows;      // the first row of each tile, and the end
  std::vector<int64_t> tile_runs;      // where the runs of a tile begin, and the end
  std::vector<Run> runs;
  bool share;  // whether rows go together at all

  int64_t rows() const { return static_cast<int64_t>(lengths.size()); }

  // How much of a block a row sees: lanes [low, high).
  void seen(int row, int block, int* low, int* high) const {
    const int64_t at = static_cast<int64_t>(block) * kBlock;
    *low = static_cast<int>(std::clamp<int64_t>(starts[row] - at, 0, kBlock));
    *high = static_cast<int>(std::clamp<int64_t>(lengths[row] - at, 0, kBlock));
  }

  // Whether two rows have the same slots in a block, up to the end of the shorter.
  bool same(int a, int b, int block) const {
    const int64_t at = static_cast<int64_t>(block) * kBlock;
    const int64_t end = std::min({lengths[a], lengths[b], at + kBlock});
    return tables[a] == tables[b] ||
           !std::memcmp(tables[a] + at, tables[b] + at, sizeof(int32_t) * (end - at));
  }

  // Of rows [first, last), each with as many as go together.
  void add_runs(int first, int last, std::vector<Run>& runs) const {
    int64_t end = 0, start = lengths[first];
    for (int row = first; row < last; ++row) {
      end = std::max(end, lengths[row]);
      start = std::min(start, starts[row]);
    }
    for (int block = static_cast<int>(start / kBlock); int64_t{block} * kBlock < end; ++block) {
      bool open = false;
      for (int row = first; row < last; ++row) {
        int low, high;
        seen(row, block, &low, &high);
        if (low >= high) {
          open = false;
          continue;
        }
        if (open && share && same(runs.back().longest, row, block)) {
          runs.back().last = row + 1;
          if (lengths[row] > lengths[runs.back().longest]) runs.back().longest = row;
        } else {
          runs.push_back({block, row, row + 1, row});
          open = true;
        }
      }
    }
  }
};

struct Shape {
  int group;  // query heads that share a KV head
  int dim;
  int64_t slot_stride;  // numbers from one slot of the pool to the next
  int64_t head_stride;  // and from one head to the next
  float scale;
};

// What one thread works with. All of it stays in the first cache levels. `Product` says how numbers
// lie in it: a cell is a float, or two numbers of 16 bits.
struct Work {
  alignas(64) float keys[kMaxDim * kBlock];           // cells [dim][key]
  alignas(64) float values[kMaxDim * kBlock];         // cells [key][dim], where they are copied
  alignas(64) float queries[kMaxQueries * kMaxDim];   // cells [query][dim], scaled
  alignas(64) float weights[kMaxQueries * kBlock];    // [query][key], then cells
  alignas(64) float out[kMaxQueries * kMaxDim];
  const float* rows[kBlock];  // the values of each key, or of each pair of keys
  Vec total[kMaxQueries];     // by lane of the keys
  float largest[kMaxQueries];
};

// Products of floats, whatever the pool holds.
struct Single {
  static constexpr int kPerCell = 1;
  typedef float Cell;

  static Vec plus(Vec sum, Cell x, Vec y) { return sum + x * y; }

  static Vec power(Vec x) { return exp_of(x); }

  template <typename Number>
  static Vec cells(const Number* from) {
    return load(from);
  }

  static void set_query(const float* q, float scale, int dim, float* to) {
    for (int i = 0; i < dim; ++i) to[i] = q[i] * scale;
  }

  static void set_weights(float* to, const Vec* x) {
    store(to, x[0]);
    store(to + kLanes, x[1]);
  }

  static void set_rows(const float* values, const int32_t* slots, int low, int high,
                       int64_t slot_stride, int, Work& work) {
    for (int j = low; j < high; ++j) work.rows[j] = values + slots[j] * slot_stride;
  }

  static void set_rows(const Half* values, const int32_t* slots, int low, int high,
                       int64_t slot_stride, int dim, Work& work) {
    for (int j = low; j < high; ++j) {
      float* row = work.values + j * dim;
      for (int d = 0; d < dim; d += kLanes) store(row + d, load(values + slots[j] * slot_stride + d));
      work.rows[j] = row;
    }
  }

  static void write(const float* out, float total, int dim, float* to) {
    for (int i = 0; i < dim; i += kLanes) store(to + i, load(out + i) / total);
  }
};

#ifdef __AVX512BF16__
// Two products at once, each of two bfloat16, summed in floats: of neighbours among the dimensions
// of queries and keys, and among the keys of weights and values. Dimensions come in chunks of 32;
// while they are summed, the values of a chunk are in the order in which pairs are made fastest.
struct Paired {
  static constexpr int kPerCell = 2;
  typedef int32_t Cell __attribute__((may_alias));

  static Vec plus(Vec sum, int32_t x, Vec y) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(x), (__m512bh)y);
  }

  // Scores are in powers of two. 2^x to 8 parts in 100,000, finer than a bfloat16.
  static Vec power(Vec x) {
    const Vec shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vec n = (x + shift) - shift;
    const Vec r = x - n;
    Vec p = all(0.0551716649f);
    p = p * r + 0.242611122f;
    p = p * r + 0.693260986f;
    p = p * r + 0.999928074f;
    return _mm512_maskz_scalef_ps(0xffff, p, n);  // of all lanes; GCC warns of the plain one
  }

  static Vec cells(const Half* from) { return load(reinterpret_cast<const float*>(from)); }

  static void set_query(const float* q, float scale, int dim, float* to) {
    scale *= 1.44269504f;  // 1 / ln 2
    for (int i = 0; i < dim; i += 2 * kLanes)
      store(to + i / 2, pairs(load(q + i) * scale, load(q + i + kLanes) * scale));
  }

  static void set_weights(float* to, const Vec* x) { store(to, pairs(x[0], x[1])); }

  static void set_rows(const Half* values, const int32_t* slots, int low, int high,
                       int64_t slot_stride, int dim, Work& work) {
    for (int j = low & ~1; j < high; j += 2) {
      float* row = work.values + j / 2 * dim;
      const Half* first = j < low ? nullptr : values + slots[j] * slot_stride;
      const Half* second = j + 1 < high ? values + slots[j + 1] * slot_stride : nullptr;
      for (int d = 0; d < dim; d += 2 * kLanes) {
        const __m512i a = first ? _mm512_loadu_si512(first + d) : __m512i{};
        const __m512i b = second ? _mm512_loadu_si512(second + d) : __m512i{};
        _mm512_store_si512(row + d, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(row + d + kLanes, _mm512_unpackhi_epi16(a, b));
      }
      work.rows[j / 2] = row;
    }
  }

  // Of 32 dimensions the unpacked ones are, by eights: four of the low, then four of the high.
  static void write(const float* out, float total, int dim, float* to) {
    const auto place = [](int i) { return i / 8 * 4 + i % 4 + (i & 4 ? kLanes : 0); };
    for (int i = 0; i < dim; i += 2 * kLanes) {
      const Vec low = load(out + i), high = load(out + i + kLanes);
      store(to + i, picked(low, high, place) / total);
      store(to + i + kLanes, picked(low, high, [&](int i) { return place(i + kLanes); }) / total);
    }
  }

  static Vec pairs(Vec low, Vec high) { return (Vec)_mm512_cvtne2ps_pbh(high, low); }
};

template <typename Number, int D>
using Product = std::conditional_t<std::is_same_v<Number, Half> && D % 32 == 0, Paired, Single>;
#else
template <typename Number, int D>
using Product = Single;
#endif

// N queries times the keys of a block, each of C cells.
template <typename P, int C, int N>
void scores(const float* queries, const float* keys, float* to) {
  const auto* q = reinterpret_cast<const typename P::Cell*>(queries);
  Vec sums[N][2] = {};
  for (int c = 0; c < C; ++c) {
    const Vec low = load(keys + c * kBlock), high = load(keys + c * kBlock + kLanes);
    for (int i = 0; i < N; ++i) {
      sums[i][0] = P::plus(sums[i][0], q[i * C + c], low);
      sums[i][1] = P::plus(sums[i][1], q[i * C + c], high);
    }
  }
  for (int i = 0; i < N; ++i) {
    store(to + i * kBlock, sums[i][0]);
    store(to + i * kBlock + kLanes, sums[i][1]);
  }
}

template <typename P, int C, typename Coming>
void scores(const float* q, const float* keys, int count, float* to, Coming& coming) {
  const auto go = [&](auto n) {
    scores<P, C, n>(q, keys, to);
    coming.fetch(n);
    count -= n;
    q += n * C;
    to += n * kBlock;
  };
  while (count >= 8) go(std::integral_constant<int, 8>{});
  while (count >= 3) go(std::integral_constant<int, 3>{});
  while (count) go(std::integral_constant<int, 1>{});
}

// Keys [low, high) of a block to cells [dim][key]; zeros for the others.
template <typename P, int C, typename Number>
void turn_keys(const Number* keys, const int32_t* slots, int low, int high, int64_t slot_stride,
               float* to) {
  for (int half = 0; half < kBlock; half += kLanes)
    for (int c = 0; c < C; c += kLanes) {
      Vec square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const int j = half + i;
        square[i] = j < low || j >= high
                        ? Vec{}
                        : P::cells(keys + slots[j] * slot_stride + c * P::kPerCell);
      }
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store(to + (c + i) * kBlock + half, square[i]);
    }
}

// N queries, V vectors of each row of values: rows [first, last).
template <typename P, int N, int V>
void add_values(const float* weights, const float* const* rows, int first, int last, int at,
                float* out, int dim) {
  const auto* w = reinterpret_cast<const typename P::Cell*>(weights);
  Vec sums[N][V];
  for (int i = 0; i < N; ++i)
    for (int v = 0; v < V; ++v) sums[i][v] = load(out + i * dim + at + v * kLanes);
  for (int j = first; j < last; ++j) {
    Vec parts[V];
    for (int v = 0; v < V; ++v) parts[v] = load(rows[j] + at + v * kLanes);
    for (int i = 0; i < N; ++i)
      for (int v = 0; v < V; ++v) sums[i][v] = P::plus(sums[i][v], w[i * kBlock + j], parts[v]);
  }
  for (int i = 0; i < N; ++i)
    for (int v = 0; v < V; ++v) store(out + i * dim + at + v * kLanes, sums[i][v]);
}

template <typename P, int N>
void add_values(const float* weights, const float* const* rows, int first, int last, float* out,
                int dim) {
  int at = 0;
  for (; at + 4 * kLanes <= dim; at += 4 * kLanes)
    add_values<P, N, 4>(weights, rows, first, last, at, out, dim);
  for (; at < dim; at += kLanes) add_values<P, N, 1>(weights, rows, first, last, at, out, dim);
}

// The softmax of one query goes on over a block of which it sees lanes [low, high). Its powers are
// of what exceeds `largest`, which follows the largest score from afar: a score may exceed it by
// kSlack before all that was summed is shrunk.
template <typename P>
void weigh(float* weights, int low, int high, float* largest, Vec* total, float* out, int dim) {
  Vec x[2] = {load(weights), load(weights + kLanes)};
  const bool whole = low == 0 && high == kBlock;
  IntVec seen[2];
  if (!whole) {
    IntVec lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    seen[0] = (lane >= low) & (lane < high);
    seen[1] = (lane + kLanes >= low) & (lane + kLanes < high);
    for (int i = 0; i < 2; ++i) x[i] = seen[i] ? x[i] : all(kUnseen);
  }
  const Vec larger_ones = larger(x[0], x[1]);
  if (any_above(larger_ones, *largest + kSlack)) {
    const float most = largest_of(larger_ones);
    const Vec shrink = P::power(all(*largest - most));
    *largest = most;
    *total *= shrink;
    for (int i = 0; i < dim; i += kLanes) store(out + i, load(out + i) * shrink);
  }
  for (int i = 0; i < 2; ++i) {
    x[i] = P::power(x[i] - *largest);
    if (!whole) x[i] = seen[i] ? x[i] : Vec{};
  }
  P::set_weights(weights, x);
  *total += x[0] + x[1];
}

// The keys and values of the run that comes next, on their way from memory while this one is worked
// on: a few at a time, for many at once would have to wait for each other.
template <typename Number, int D>
class Coming {
 public:
  // queries: of the run that is worked on, each of which tells of itself twice.
  Coming(const Plan& plan, const Run* run, const Number* keys, const Number* values,
         int64_t slot_stride, int queries)
      : keys_(keys), values_(values), slot_stride_(slot_stride) {
    if (!run) return;
    slots_ = plan.tables[run->longest] + int64_t{run->block} * kBlock;
    plan.seen(run->longest, run->block, &next_, &end_);
    share_ = static_cast<float>(end_ - next_) / (2 * queries);
  }

  __attribute__((always_inline)) void fetch(int queries) {
    due_ += share_ * queries;
    for (; due_ > 0 && next_ < end_; ++next_, --due_)
      for (int i = 0; i < D; i += 64 / static_cast<int>(sizeof(Number))) {
        __builtin_prefetch(keys_ + slots_[next_] * slot_stride_ + i);
        __builtin_prefetch(values_ + slots_[next_] * slot_stride_ + i);
      }
  }

 private:
  const Number *keys_, *values_;
  const int64_t slot_stride_;
  const int32_t* slots_ = nullptr;
  int next_ = 0, end_ = 0;
  float share_ = 0, due_ = 0;
};

template <typename Number, int D>
void attend_run(const Plan& plan, const Run& run, const Run* next, int tile, const Number* keys,
                const Number* values, const Shape& shape, Work& work) {
  using P = Product<Number, D>;
  constexpr int kCells = D / P::kPerCell;
  const int32_t* slots = plan.tables[run.longest] + int64_t{run.block} * kBlock;
  int low, high;
  plan.seen(run.longest, run.block, &low, &high);
  for (int row = run.first; row < run.last; ++row) {
    int own_low, own_high;
    plan.seen(row, run.block, &own_low, &own_high);
    low = std::min(low, own_low);
  }
  turn_keys<P, kCells>(keys, slots, low, high, shape.slot_stride, work.keys);
  const int first = (run.first - tile) * shape.group;
  const int count = (run.last - run.first) * shape.group;
  float* weights = work.weights + first * kBlock;
  Coming<Number, D> coming(plan, next, keys, values, shape.slot_stride, count);
  scores<P, kCells>(work.queries + first * kCells, work.keys, count, weights, coming);
  for (int row = run.first, i = 0; row < run.last; ++row) {
    int own_low, own_high;
    plan.seen(row, run.block, &own_low, &own_high);
    for (const int end = i + shape.group; i < end; ++i)
      weigh<P>(weights + i * kBlock, own_low, own_high, work.largest + first + i,
               work.total + first + i, work.out + (first + i) * D, D);
  }
  P::set_rows(values, slots, low, high, shape.slot_stride, D, work);
  low /= P::kPerCell;
  high = (high + P::kPerCell - 1) / P::kPerCell;
  float* out = work.out + first * D;
  int at = 0;
  const auto go = [&](auto n) {
    add_values<P, n>(weights + at * kBlock, work.rows, low, high, out + at * D, D);
    coming.fetch(n);
    at += n;
  };
  while (at + 6 <= count) go(std::integral_constant<int, 6>{});
  while (at + 3 <= count) go(std::integral_constant<int, 3>{});
  while (at < count) go(std::integral_constant<int, 1>{});
}

// Rows [first, last) with one KV head, through their runs. Returns whether all is finite.
template <typename Number, int D>
bool attend_rows(const Plan& plan, int first, int last, const Run* run, const Run* end,
                 const float* q, int64_t q_stride, const Number* keys, const Number* values,
                 const Shape& shape, float* out, int64_t out_stride, Work& work) {
  using P = Product<Number, D>;
  const int width = shape.group * D;
  for (int row = first; row < last; ++row)
    P::set_query(q + row * q_stride, shape.scale, width,
                 work.queries + (row - first) * width / P::kPerCell);
  const int count = (last - first) * shape.group;
  std::fill_n(work.out, count * D, 0.0f);
  std::fill_n(work.largest, count, kNone);
  std::fill_n(work.total, count, Vec{});
  for (; run < end; ++run)
    attend_run<Number, D>(plan, *run, run + 1 < end ? run + 1 : nullptr, first, keys, values,
                          shape, work);
  Vec odd = {};
  for (int query = 0; query < count; ++query) {
    const int row = first + query / shape.group;
    float* to = out + row * out_stride + query % shape.group * D;
    P::write(work.out + query * D, sum_of(work.total[query]), D, to);
    for (int i = 0; i < D; i += kLanes) odd += load(to + i) * 0.0f;
  }
  return sum_of(odd) == 0;
}

// Rows that go together multiply what one of them does not see by 0, which is NaN where that is not
// finite. So where anything is not, each row goes alone.
template <typename Number, int D>
void attend_tile(const Plan& plan, int64_t tile, const float* q, int64_t q_stride,
                 const Number* keys, const Number* values, const Shape& shape, float* out,
                 int64_t out_stride, Work& work) {
  const int first = plan.tile_rows[tile], last = plan.tile_rows[tile + 1];
  const Run* runs = plan.runs.data();
  if (attend_rows<Number, D>(plan, first, last, runs + plan.tile_runs[tile],
                             runs + plan.tile_runs[tile + 1], q, q_stride, keys, values, shape,
                             out, out_stride, work) ||
      last - first == 1)
    return;
  std::vector<Run> own;
  for (int row = first; row < last; ++row) {
    own.clear();
    plan.add_runs(row, row + 1, own);
    attend_rows<Number, D>(plan, row, row + 1, own.data(), own.data() + own.size(), q, q_stride,
                           keys, values, shape, out, out_stride, work);
  }
}

// Write the step's keys and values to the pool, then attend. See stemma_attention.
template <typename Number>
struct Step {
  const Plan& plan;
  const float *q, *k, *v;
  int64_t q_stride, k_stride, v_stride;
  Number *k_pool, *v_pool;
  Shape shape;
  int kv_heads;
  float* out;
  int threads;

  void write() const {
    const int dim = shape.dim;
#pragma omp parallel for schedule(static) num_threads(threads) if (plan.rows() > 63)
    for (int64_t row = 0; row < plan.rows(); ++row) {
      for (int head = 0; head < kv_heads; ++head) {
        const int64_t to = plan.slots[row] * shape.slot_stride + head * shape.head_stride;
        for (int i = 0; i < dim; i += kLanes) {
          store(k_pool + to + i, load(k + row * k_stride + head * dim + i));
          store(v_pool + to + i, load(v + row * v_stride + head * dim + i));
        }
      }
    }
  }

  template <int D>
  void attend() const {
    const int64_t tiles = static_cast<int64_t>(plan.tile_rows.size()) - 1;
    const int64_t out_stride = int64_t{kv_heads} * shape.group * D;
#pragma omp parallel num_threads(threads)
    {
      static thread_local Work* work = new Work();  // as long as the thread, which torch keeps
#pragma omp for schedule(dynamic)
      for (int64_t task = tiles * kv_heads - 1; task >= 0; --task) {  // the longest come last
        const int64_t tile = task / kv_heads, head = task % kv_heads;
        const int64_t first = head * shape.group * D;
        const int64_t at = head * shape.head_stride;
        attend_tile<Number, D>(plan, tile, q + first, q_stride, k_pool + at, v_pool + at, shape,
                               out + first, out_stride, *work);
      }
    }
  }

  int run() const {
    if (shape.group > kMaxQueries) return 1;
    write();
    switch (shape.dim) {
#define STEMMA_DIM(D) \
  case D:             \
    attend<D>();      \
    return 0;
      STEMMA_DIM(16)
      STEMMA_DIM(32)
      STEMMA_DIM(48)
      STEMMA_DIM(64)
      STEMMA_DIM(80)
      STEMMA_DIM(96)
      STEMMA_DIM(112)
      STEMMA_DIM(128)
      STEMMA_DIM(256)
#undef STEMMA_DIM
      default: return 1;
    }
  }
};

}  // namespace
}  // namespace stemma

using stemma::Plan;

// The plan of one step. tables[i]: address of the slots of row i's sequence. lengths[i]: how many of
// them it sees. window: the most that it sees, or 0. slots[i]: its own. group: query heads per KV
// head. share: 0 sends every row through its keys alone. To be freed.
extern "C" Plan* stemma_attention_plan(const int64_t* tables, const int64_t* lengths,
                                       const int64_t* slots, int64_t rows, int64_t window,
                                       int group, int share, int threads) {
  auto* plan = new Plan();
  plan->share = share != 0;
  plan->lengths.assign(lengths, lengths + rows);
  plan->slots.assign(slots, slots + rows);
  for (int64_t row = 0; row < rows; ++row) {
    plan->tables.push_back(reinterpret_cast<const int32_t*>(tables[row]));
    plan->starts.push_back(window ? std::max<int64_t>(0, lengths[row] - window) : 0);
  }
  const int64_t most = std::clamp<int64_t>(stemma::kMaxQueries / group, 1, stemma::kTile);
  const int64_t tile = std::clamp<int64_t>((rows + threads - 1) / threads, 1, most);
  for (int64_t row = 0; row < rows; row += tile) {
    plan->tile_rows.push_back(static_cast<int32_t>(row));
    plan->tile_runs.push_back(static_cast<int64_t>(plan->runs.size()));
    plan->add_runs(static_cast<int>(row), static_cast<int>(std::min(row + tile, rows)),
                   plan->runs);
  }
  plan->tile_rows.push_back(static_cast<int32_t>(rows));
  plan->tile_runs.push_back(static_cast<int64_t>(plan->runs.size()));
  return plan;
}

extern "C" void stemma_attention_free(Plan* plan) { delete plan; }

// Write the step's k and v to the pool, then attend. q: [rows, heads, dim], k, v: [rows, kv_heads,
// dim], each row dense and `stride` floats from the next. k_pool, v_pool: `dim` numbers of each head
// in each slot, side by side; slot_stride and head_stride: how many numbers it is to the next.
// halves: whether these are bfloat16 and not floats. out: [rows, heads * dim], dense. Returns 0, or
// 1 for a shape that it has no room for.
extern "C" int stemma_attention(const Plan* plan, const float* q, const float* k, const float* v,
                                int64_t q_stride, int64_t k_stride, int64_t v_stride, void* k_pool,
                                void* v_pool, int64_t slot_stride, int64_t head_stride,
                                int halves, int heads, int kv_heads, int dim, float scale,
                                float* out, int threads) {
  const auto run = [&](auto* keys, auto* values) {
    const stemma::Shape shape{heads / kv_heads, dim, slot_stride, head_stride, scale};
    return stemma::Step<std::remove_pointer_t<decltype(keys)>>{
        *plan, q, k, v, q_stride, k_stride, v_stride, keys, values, shape, kv_heads, out, threads}
        .run();
  };
  if (halves) return run(static_cast<stemma::Half*>(k_pool), static_cast<stemma::Half*>(v_pool));
  return run(static_cast<float*>(k_pool), static_cast<float*>(v_pool));
}
