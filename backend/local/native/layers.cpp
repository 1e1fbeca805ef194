// The layers of an int8 decoder, cut where attention goes in: products, and one pass over each row
// between two of them.
//
// A product of int8 rows and int8 weights is exact in int32, and each row is worked on by itself:
// its result has the same bits whatever else is in the batch. `step` is what one unit of a
// quantised row is worth, `scale` what one unit of an output channel of the weights is.
// Called by layers.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "products.h"

// Compiled once, not anew wherever it is called: every caller gets the same bits.
#define STEMMA_ONCE __attribute__((noinline))

namespace stemma {
namespace {

constexpr float kSteps = 127.0f;
constexpr float kLeast = 1e-30f;  // stands for the largest value of a row of zeros

// [width] floats to raised int8; returns what a unit is worth: NaN if one of them is not finite, for
// an integer cannot tell. width: a multiple of 16.
STEMMA_ONCE float quantise(const float* x, int width, uint8_t* to) {
  Vec most = {}, odd = {};
  for (int i = 0; i < width; i += kLanes) {
    const Vec v = load(x + i);
    most = larger(most, larger(v, -v));
    odd += v * 0.0f;
  }
  const float step = std::max(largest_of(most), kLeast) / kSteps + sum_of(odd);
  const float inverse = 1.0f / step;
  for (int i = 0; i < width; ++i)
    to[i] = static_cast<uint8_t>(static_cast<int32_t>(std::nearbyintf(x[i] * inverse)) + kRaise);
  return step;
}

// Sixteen values of a product from column i on.
inline Vec value(const int32_t* product, float step, const float* scale, const float* bias, int i) {
  const IntVec units = *reinterpret_cast<const UnalignedIntVec*>(product + i);
  const Vec y = __builtin_convertvector(units, Vec) * step * load(scale + i);
  return bias ? y + load(bias + i) : y;
}

// x += the product, if there is one; x over its root mean square goes to `normed` and, quantised, to
// `to`. Returns the step.
STEMMA_ONCE float add_norm_quantise(float* x, const int32_t* product, float step, const float* scale,
                        const float* bias, int width, float eps, float* normed, uint8_t* to) {
  Vec squares = {};
  for (int i = 0; i < width; i += kLanes) {
    Vec sum = load(x + i);
    if (product) store(x + i, sum += value(product, step, scale, bias, i));
    squares += sum * sum;
  }
  const float inverse = 1.0f / std::sqrt(sum_of(squares) / width + eps);
  for (int i = 0; i < width; i += kLanes) store(normed + i, load(x + i) * inverse);
  return quantise(normed, width, to);
}

// Each pair of lanes that are H apart becomes its sum and its difference.
template <int H>
Vec butterfly(Vec x) {
  Vec sign;
  for (int i = 0; i < kLanes; ++i) sign[i] = i & H ? -1.0f : 1.0f;
  return sign * x + across<H>(x);
}

// Each block of x times the Hadamard matrix of that size, by sums and differences.
void hadamard(float* x, int width, int block) {
  const float norm = 1.0f / std::sqrt(static_cast<float>(block));
  for (int i = 0; i < width; i += kLanes) {
    Vec v = load(x + i) * norm;
    if (block > 1) v = butterfly<1>(v);
    if (block > 2) v = butterfly<2>(v);
    if (block > 4) v = butterfly<4>(v);
    if (block > 8) v = butterfly<8>(v);
    store(x + i, v);
  }
  for (int half = kLanes; half < block; half *= 2)
    for (int at = 0; at < width; at += 2 * half)
      for (int i = at; i < at + half; i += kLanes) {
        const Vec a = load(x + i), b = load(x + i + half);
        store(x + i, a + b);
        store(x + i + half, a - b);
      }
}

// silu(gate) * up, each block turned by a Hadamard matrix, quantised. Returns the step.
STEMMA_ONCE float gate_quantise(const int32_t* product, float step, const float* scale, const float* bias,
                    int width, int block, float* buffer, uint8_t* to) {
  for (int i = 0; i < width; i += kLanes) {
    const Vec gate = value(product, step, scale, bias, i);
    const Vec up = value(product, step, scale, bias, width + i);
    const Vec least = all(-80.0f);  // e^80 is finite, and silu of less is nearly 0
    const Vec bounded = gate < least ? least : gate;
    store(buffer + i, gate / (1.0f + exp_of(-bounded)) * up);
  }
  hadamard(buffer, width, block);
  return quantise(buffer, width, to);
}

// The product as floats, which may take its place.
STEMMA_ONCE void dequantise(const int32_t* product, float step, const float* scale, const float* bias,
                int width, float* to) {
  for (int i = 0; i < width; i += kLanes) store(to + i, value(product, step, scale, bias, i));
}

// The product as floats; heads of `dim` up to column `turned` are rotated by the row's angle.
STEMMA_ONCE void rotate(const int32_t* product, float step, const float* scale, const float* bias, int width,
            int turned, int dim, const float* cosine, const float* sine, float* to) {
  dequantise(product, step, scale, bias, width, to);
  const int half = dim / 2;
  for (int head = 0; head < turned; head += dim)
    for (int i = 0; i < half; ++i) {
      const float a = to[head + i], b = to[head + half + i];
      to[head + i] = a * cosine[i] + b * sine[i];
      to[head + half + i] = b * cosine[half + i] + a * sine[half + i];
    }
}

// What lies between two attentions. turned: columns of q and k, to be rotated.
struct Between {
  Linear out, gate_up, down, qkv;
  int32_t block, turned, dim;
  float eps;
};

// Memory for the rows of a step, of the widest of all widths each, and for up to 15 more of
// `product` and `rows`.
struct Room {
  int32_t* product;
  uint8_t* rows;
  float* step;
  float* buffer;
};

// The quantised rows times the weights. By all threads of a team, which wait for each other.
void multiply(const Linear& linear, const uint8_t* rows, int64_t count, int32_t* product,
              int threads) {
  const int64_t panels = linear.out / kPanel;
#pragma omp for schedule(static)
  for (int64_t part = 0; part < threads; ++part)
    multiply_part(linear, static_cast<int>(panels * part / threads),
                  static_cast<int>(panels * (part + 1) / threads), rows, static_cast<int>(count),
                  product);
}

// x += the product, if there is one; x normalised goes to the buffer and, quantised, to the rows.
void add_norm(float* x, const Linear* linear, int width, const Room& room, int64_t rows,
              float eps) {
#pragma omp for schedule(static)
  for (int64_t r = 0; r < rows; ++r)
    room.step[r] = add_norm_quantise(
        x + r * width, linear ? room.product + r * width : nullptr, room.step[r],
        linear ? linear->scale : nullptr, linear ? linear->bias : nullptr, width, eps,
        room.buffer + r * width, room.rows + r * width);
}

// x += out(attended), then x += the MLP of x.
void finish(const Between& w, float* x, const float* attended, const Room& room, int64_t rows,
            int threads) {
#pragma omp for schedule(static)
  for (int64_t r = 0; r < rows; ++r)
    room.step[r] = quantise(attended + r * w.out.in, w.out.in, room.rows + r * w.out.in);
  multiply(w.out, room.rows, rows, room.product, threads);
  add_norm(x, &w.out, w.out.out, room, rows, w.eps);
  multiply(w.gate_up, room.rows, rows, room.product, threads);
  const int inner = w.down.in;
#pragma omp for schedule(static)
  for (int64_t r = 0; r < rows; ++r)
    room.step[r] = gate_quantise(room.product + r * 2 * inner, room.step[r], w.gate_up.scale,
                                 w.gate_up.bias, inner, w.block, room.buffer + r * inner,
                                 room.rows + r * inner);
  multiply(w.down, room.rows, rows, room.product, threads);
  add_norm(x, &w.down, w.down.out, room, rows, w.eps);
}

}  // namespace
}  // namespace stemma

// Rows of weights [out, in] to panels. begin [out]: what the sums begin with. in: a multiple of 4,
// out: of 16.
extern "C" void stemma_pack(const int8_t* weight, int in, int out, int8_t* packed,
                            int32_t* begin) {
  using stemma::kPanel;
  for (int o = 0; o < out; ++o) {
    int8_t* panel = packed + int64_t{o / kPanel} * kPanel * in + o % kPanel * 4;
    int32_t sum = 0;
    for (int i = 0; i < in; ++i) {
      const int8_t w = weight[int64_t{o} * in + i];
      panel[i / 4 * 4 * kPanel + i % 4] = w;
      sum += w;
    }
    begin[o] = -stemma::kRaise * sum;
  }
}

// From one attention to the next. x: [rows, hidden], changed in place; attended: [rows, heads *
// dim], dense, or null before the first layer. cosine, sine: [rows, dim]. qkv: [rows, heads of q, k
// and v side by side], or null behind the last layer: what follows is x normalised, in room->buffer.
extern "C" void stemma_between(const stemma::Between* w, const stemma::Room* room, float* x,
                               const float* attended, const float* cosine, const float* sine,
                               float* qkv, int width, int64_t rows, int threads) {
#pragma omp parallel num_threads(threads)
  {
    if (attended)
      stemma::finish(*w, x, attended, *room, rows, threads);
    else
      stemma::add_norm(x, nullptr, width, *room, rows, w->eps);
    if (qkv) {
      stemma::multiply(w->qkv, room->rows, rows, room->product, threads);
#pragma omp for schedule(static)
      for (int64_t r = 0; r < rows; ++r)
        stemma::rotate(room->product + r * w->qkv.out, room->step[r], w->qkv.scale, w->qkv.bias,
                       w->qkv.out, w->turned, w->dim, cosine + r * w->dim, sine + r * w->dim,
                       qkv + r * w->qkv.out);
    }
  }
}

struct Plan;
extern "C" int stemma_attention(const Plan*, const float*, const float*, const float*, int64_t,
                                int64_t, int64_t, void*, void*, int64_t, int64_t, int, int, int,
                                int, float, float*, int);

// All layers with their attentions in one call. w: of layers + 1, from attention to attention.
// k_pools, v_pools: of each layer, see stemma_attention. qkv, attended: memory for the rows.
// Leaves x normalised in room->buffer. Returns what stemma_attention does.
extern "C" int stemma_decode(const stemma::Between* w, const stemma::Room* room, float* x,
                             const float* cosine, const float* sine, float* qkv, float* attended,
                             int width, int layers, int64_t rows, const Plan* plan,
                             void* const* k_pools, void* const* v_pools, int64_t slot_stride,
                             int64_t head_stride, int halves, int heads, int kv_heads, float scale, int threads) {
  const int dim = w->dim;
  const int64_t stride = w->qkv.out;
  for (int layer = 0; layer < layers; ++layer) {
    stemma_between(w + layer, room, x, layer ? attended : nullptr, cosine, sine, qkv, width, rows,
                   threads);
    const float *k = qkv + heads * dim, *v = k + kv_heads * dim;
    if (const int wrong = stemma_attention(plan, qkv, k, v, stride, stride, stride, k_pools[layer],
                                           v_pools[layer], slot_stride, head_stride, halves,
                                           heads, kv_heads, dim, scale, attended, threads))
      return wrong;
  }
  stemma_between(w + layers, room, x, attended, cosine, sine, nullptr, width, rows, threads);
  return 0;
}

// A linear map. x: [rows, in] dense -> to: [rows, out] with room for up to 15 rows more, for it also
// serves for the products.
extern "C" void stemma_linear(const stemma::Linear* linear, const stemma::Room* room,
                              const float* x, float* to, int64_t rows, int threads) {
  int32_t* product = reinterpret_cast<int32_t*>(to);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; ++r)
      room->step[r] = stemma::quantise(x + r * linear->in, linear->in, room->rows + r * linear->in);
    stemma::multiply(*linear, room->rows, rows, product, threads);
    constexpr int kPart = 1024;
    const int parts = (linear->out + kPart - 1) / kPart;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows * parts; ++i) {
      const int start = static_cast<int>(i % parts) * kPart;
      const int64_t r = i / parts, at = r * linear->out + start;
      const float* bias = linear->bias ? linear->bias + start : nullptr;
      stemma::dequantise(product + at, room->step[r], linear->scale + start, bias,
                         std::min(kPart, linear->out - start), to + at);
    }
  }
}

// How the products are computed, for `doctor`.
extern "C" const char* stemma_products() {
#ifdef STEMMA_AMX
  if (stemma::tiles_allowed()) return "AMX";
#endif
#if defined(__AVX512VNNI__)
  return "AVX-512 VNNI";
#elif defined(__AVXVNNI__)
  return "AVX-VNNI";
#elif defined(__AVX2__)
  return "AVX2";
#else
  return "plain C++";
#endif
}
