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
#include <vector>

#include "vectors.h"

namespace stemma {
namespace {

constexpr int kBlock = 32;       // keys
constexpr int kTile = 32;        // rows that one task goes through, at most
constexpr int kMaxDim = 256;
constexpr int kMaxQueries = 256;  // of a tile: rows times query heads per KV head

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

  void add_runs(int first, int last) {
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
  int64_t slot_stride;  // floats from one slot of the pool to the next
  float scale;
};

// What one thread works with. All of it stays in the first cache levels.
struct Work {
  alignas(64) float keys[kMaxDim * kBlock];                     // [dim][key]
  alignas(64) float queries[kMaxQueries * kMaxDim];             // scaled
  alignas(64) float weights[kMaxQueries * kBlock];
  alignas(64) float out[kMaxQueries * kMaxDim];
  Vec total[kMaxQueries];  // by lane of the keys
  float largest[kMaxQueries];
};

// N queries times the keys of a block.
template <int D, int N>
void scores(const float* q, const float* keys, float* to) {
  Vec sums[N][2] = {};
  for (int d = 0; d < D; ++d) {
    const Vec low = load(keys + d * kBlock), high = load(keys + d * kBlock + kLanes);
    for (int i = 0; i < N; ++i) {
      sums[i][0] += q[i * D + d] * low;
      sums[i][1] += q[i * D + d] * high;
    }
  }
  for (int i = 0; i < N; ++i) {
    store(to + i * kBlock, sums[i][0]);
    store(to + i * kBlock + kLanes, sums[i][1]);
  }
}

template <int D>
void scores(const float* q, const float* keys, int count, float* to) {
  for (; count >= 8; count -= 8, q += 8 * D, to += 8 * kBlock) scores<D, 8>(q, keys, to);
  for (; count >= 3; count -= 3, q += 3 * D, to += 3 * kBlock) scores<D, 3>(q, keys, to);
  for (; count; --count, q += D, to += kBlock) scores<D, 1>(q, keys, to);
}

// Keys [low, high) of a block to [dim][key]; zeros for the others.
template <int D>
void turn_keys(const float* keys, const int32_t* slots, int low, int high, int64_t slot_stride,
               float* to) {
  for (int half = 0; half < kBlock; half += kLanes)
    for (int d = 0; d < D; d += kLanes) {
      Vec square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const int j = half + i;
        square[i] = j < low || j >= high ? Vec{} : load(keys + slots[j] * slot_stride + d);
      }
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store(to + (d + i) * kBlock + half, square[i]);
    }
}

// N queries, C vectors of each value.
template <int N, int C>
void add_values(const float* weights, const float* values, const int32_t* slots, int low, int high,
                int64_t slot_stride, float* out, int dim) {
  Vec sums[N][C];
  for (int i = 0; i < N; ++i)
    for (int c = 0; c < C; ++c) sums[i][c] = load(out + i * dim + c * kLanes);
  for (int j = low; j < high; ++j) {
    const float* value = values + slots[j] * slot_stride;
    Vec parts[C];
    for (int c = 0; c < C; ++c) parts[c] = load(value + c * kLanes);
    for (int i = 0; i < N; ++i)
      for (int c = 0; c < C; ++c) sums[i][c] += weights[i * kBlock + j] * parts[c];
  }
  for (int i = 0; i < N; ++i)
    for (int c = 0; c < C; ++c) store(out + i * dim + c * kLanes, sums[i][c]);
}

template <int N>
void add_values(const float* weights, const float* values, const int32_t* slots, int low, int high,
                int64_t slot_stride, float* out, int dim) {
  int at = 0;
  for (; at + 4 * kLanes <= dim; at += 4 * kLanes)
    add_values<N, 4>(weights, values + at, slots, low, high, slot_stride, out + at, dim);
  for (; at < dim; at += kLanes)
    add_values<N, 1>(weights, values + at, slots, low, high, slot_stride, out + at, dim);
}

// The softmax of one query goes on over a block of which it sees lanes [low, high).
inline void weigh(float* weights, int low, int high, float* largest, Vec* total, float* out,
                  int dim) {
  IntVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  const Vec hidden = all(-1e30f);
  const IntVec seen[2] = {(lane >= low) & (lane < high),
                          (lane + kLanes >= low) & (lane + kLanes < high)};
  Vec x[2] = {load(weights), load(weights + kLanes)};
  for (int i = 0; i < 2; ++i) x[i] = seen[i] ? x[i] : hidden;
  const float most = std::max(*largest, largest_of(larger(x[0], x[1])));
  const float shrink = most == *largest ? 1.0f : exp_of(*largest - most);
  for (int i = 0; i < 2; ++i) {
    x[i] = seen[i] ? exp_of(x[i] - most) : Vec{};
    store(weights + i * kLanes, x[i]);
  }
  *total = *total * shrink + (x[0] + x[1]);
  *largest = most;
  if (shrink != 1.0f)
    for (int i = 0; i < dim; i += kLanes) store(out + i, load(out + i) * shrink);
}

template <int D>
void attend_run(const Plan& plan, const Run& run, int tile, const float* keys, const float* values,
                const Shape& shape, Work& work) {
  const int32_t* slots = plan.tables[run.longest] + int64_t{run.block} * kBlock;
  int low, high;
  plan.seen(run.longest, run.block, &low, &high);
  for (int row = run.first; row < run.last; ++row) {
    int own_low, own_high;
    plan.seen(row, run.block, &own_low, &own_high);
    low = std::min(low, own_low);
  }
  turn_keys<D>(keys, slots, low, high, shape.slot_stride, work.keys);
  const int first = (run.first - tile) * shape.group;
  const int count = (run.last - run.first) * shape.group;
  float* weights = work.weights + first * kBlock;
  scores<D>(work.queries + first * D, work.keys, count, weights);
  for (int i = 0; i < count; ++i) {
    int own_low, own_high;
    plan.seen(run.first + i / shape.group, run.block, &own_low, &own_high);
    weigh(weights + i * kBlock, own_low, own_high, work.largest + first + i,
          work.total + first + i, work.out + (first + i) * D, D);
  }
  float* out = work.out + first * D;
  int at = 0;
  for (; at + 6 <= count; at += 6)
    add_values<6>(weights + at * kBlock, values, slots, low, high, shape.slot_stride, out + at * D, D);
  for (; at + 3 <= count; at += 3)
    add_values<3>(weights + at * kBlock, values, slots, low, high, shape.slot_stride, out + at * D, D);
  for (; at < count; ++at)
    add_values<1>(weights + at * kBlock, values, slots, low, high, shape.slot_stride, out + at * D, D);
}

template <int D>
void attend_tile(const Plan& plan, int64_t tile, const float* q, int64_t q_stride,
                 const float* keys, const float* values, const Shape& shape, float* out,
                 int64_t out_stride, Work& work) {
  const int first = plan.tile_rows[tile], last = plan.tile_rows[tile + 1];
  const int width = shape.group * D;
  for (int row = first; row < last; ++row)
    for (int i = 0; i < width; ++i)
      work.queries[(row - first) * width + i] = q[row * q_stride + i] * shape.scale;
  const int count = (last - first) * shape.group;
  std::fill_n(work.out, count * D, 0.0f);
  std::fill_n(work.largest, count, -1e30f);
  std::fill_n(work.total, count, Vec{});
  for (int64_t i = plan.tile_runs[tile]; i < plan.tile_runs[tile + 1]; ++i)
    attend_run<D>(plan, plan.runs[i], first, keys, values, shape, work);
  for (int query = 0; query < count; ++query) {
    const int row = first + query / shape.group;
    float* to = out + row * out_stride + query % shape.group * D;
    const float total = sum_of(work.total[query]);
    for (int i = 0; i < D; ++i) to[i] = work.out[query * D + i] / total;
  }
}

template <int D>
void attend(const Plan& plan, const float* q, int64_t q_stride, const float* k_pool,
            const float* v_pool, const Shape& shape, int kv_heads, float* out, int threads) {
  const int64_t tiles = static_cast<int64_t>(plan.tile_rows.size()) - 1;
  const int64_t out_stride = int64_t{kv_heads} * shape.group * D;
#pragma omp parallel num_threads(threads)
  {
    static thread_local Work* work = new Work();  // as long as the thread, which torch keeps
#pragma omp for schedule(dynamic)
    for (int64_t task = tiles * kv_heads - 1; task >= 0; --task) {  // the longest come last
      const int64_t tile = task / kv_heads, head = task % kv_heads;
      const int64_t first = head * shape.group * D;
      attend_tile<D>(plan, tile, q + first, q_stride, k_pool + head * D, v_pool + head * D, shape,
                     out + first, out_stride, *work);
    }
  }
}

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
  const int64_t most = std::min<int64_t>(stemma::kTile, stemma::kMaxQueries / group);
  const int64_t tile = std::clamp<int64_t>((rows + threads - 1) / threads, 1, most);
  for (int64_t row = 0; row < rows; row += tile) {
    plan->tile_rows.push_back(static_cast<int32_t>(row));
    plan->tile_runs.push_back(static_cast<int64_t>(plan->runs.size()));
    plan->add_runs(static_cast<int>(row), static_cast<int>(std::min(row + tile, rows)));
  }
  plan->tile_rows.push_back(static_cast<int32_t>(rows));
  plan->tile_runs.push_back(static_cast<int64_t>(plan->runs.size()));
  return plan;
}

extern "C" void stemma_attention_free(Plan* plan) { delete plan; }

// Write the step's k and v to the pool, then attend. q: [rows, heads, dim], k, v: [rows, kv_heads,
// dim], each row dense and `stride` floats from the next. k_pool, v_pool: [slots, kv_heads, dim].
// out: [rows, heads * dim], dense. Returns 0, or 1 for a shape that it has no room for.
extern "C" int stemma_attention(const Plan* plan, const float* q, const float* k, const float* v,
                                int64_t q_stride, int64_t k_stride, int64_t v_stride,
                                float* k_pool, float* v_pool, int64_t slot_stride, int heads,
                                int kv_heads, int dim, float scale, float* out, int threads) {
  const stemma::Shape shape{heads / kv_heads, dim, slot_stride, scale};
  if (shape.group > stemma::kMaxQueries) return 1;
  const size_t width = sizeof(float) * kv_heads * dim;
#pragma omp parallel for schedule(static) num_threads(threads) if (plan->rows() > 63)
  for (int64_t row = 0; row < plan->rows(); ++row) {
    std::memcpy(k_pool + plan->slots[row] * slot_stride, k + row * k_stride, width);
    std::memcpy(v_pool + plan->slots[row] * slot_stride, v + row * v_stride, width);
  }
  switch (dim) {
#define STEMMA_DIM(D)                                                                            \
  case D:                                                                                        \
    stemma::attend<D>(*plan, q, q_stride, k_pool, v_pool, shape, kv_heads, out, threads);        \
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
