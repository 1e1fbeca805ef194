// What lies between the integer products of a decoder layer, one pass over each row.
//
// A product of int8 rows and int8 weights is exact in int32, and each row is worked on by itself:
// its result has the same bits whatever else is in the batch. `step` is what one unit of a
// quantised row is worth, `scale` what one unit of an output channel of the weights is.
// Called by layers.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "vectors.h"

// Compiled once, not anew wherever it is called: every caller gets the same bits.
#define STEMMA_ONCE __attribute__((noinline))

namespace stemma {
namespace {

constexpr float kSteps = 127.0f;
constexpr float kLeast = 1e-30f;  // stands for the largest value of a row of zeros

// [width] floats to int8; returns what a unit is worth: NaN if one of them is not finite, for an
// integer cannot tell. width: a multiple of 16.
STEMMA_ONCE float quantise(const float* x, int width, int8_t* to) {
  Vec most = {}, odd = {};
  for (int i = 0; i < width; i += kLanes) {
    const Vec v = load(x + i);
    most = larger(most, larger(v, -v));
    odd += v * 0.0f;
  }
  const float step = std::max(largest_of(most), kLeast) / kSteps + sum_of(odd);
  const float inverse = 1.0f / step;
  for (int i = 0; i < width; ++i)
    to[i] = static_cast<int8_t>(static_cast<int32_t>(std::nearbyintf(x[i] * inverse)));
  return step;
}

// Sixteen values of a product from column i on.
inline Vec value(const int32_t* product, float step, const float* scale, const float* bias, int i) {
  typedef int32_t Unaligned __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
  const IntVec units = *reinterpret_cast<const Unaligned*>(product + i);
  const Vec y = __builtin_convertvector(units, Vec) * step * load(scale + i);
  return bias ? y + load(bias + i) : y;
}

// x += the product, if there is one; x over its root mean square goes to `normed` and, quantised, to
// `to`. Returns the step.
STEMMA_ONCE float add_norm_quantise(float* x, const int32_t* product, float step, const float* scale,
                        const float* bias, int width, float eps, float* normed, int8_t* to) {
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
  IntVec across;
  Vec sign;
  for (int i = 0; i < kLanes; ++i) {
    across[i] = i ^ H;
    sign[i] = i & H ? -1.0f : 1.0f;
  }
#ifdef __clang__
  Vec other;
  for (int i = 0; i < kLanes; ++i) other[i] = x[across[i]];
#else
  const Vec other = __builtin_shuffle(x, across);
#endif
  return sign * x + other;
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
                    int width, int block, float* buffer, int8_t* to) {
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

// A linear map: weight [out, in] and what makes floats of its products. shift: 128 times the sum of
// each row of the weights.
struct Linear {
  const int8_t* weight;
  const int32_t* shift;
  const float* scale;
  const float* bias;
  int32_t in, out;
};

// What lies between two attentions. turned: columns of q and k, to be rotated.
struct Between {
  Linear out, gate_up, down, qkv;
  int32_t block, turned, dim;
  float eps;
};

// Memory for few rows, of the widest of all widths each.
struct Room {
  int32_t* product;
  int8_t* rows;
  uint8_t* raised;
  float* step;
  float* buffer;
};

constexpr int kFew = 32;  // rows up to which this is faster than a general product
constexpr int kTogether = 8;  // rows that a weight is loaded once for

// [R] rows times one row of weights. The rows are raised by 128: processors multiply unsigned by
// signed bytes.
template <int R>
inline void multiply(const int8_t* weight, int32_t shift, const uint8_t* rows, int width,
                     int32_t* product, int64_t stride) {
  int32_t sums[R] = {};
  for (int i = 0; i < width; ++i) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r] += weight[i] * rows[r * width + i];
  }
  for (int r = 0; r < R; ++r) product[r * stride] = sums[r] - shift;
}

// [R] rows of floats times one row of weights. Each sum in the same order for any R.
template <int R>
STEMMA_ONCE void multiply(const float* weight, const float* rows, int width, float bias, float* to,
                          int64_t stride) {
  Vec sums[R] = {};
  for (int i = 0; i < width; i += kLanes) {
    const Vec w = load(weight + i);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r] += w * load(rows + r * width + i);
  }
  for (int r = 0; r < R; ++r) to[r * stride] = sum_of(sums[r]) + bias;
}

// Few quantised rows times the weights. By all threads of a team, which wait for each other.
void multiply(const Linear& linear, const Room& room, int rows) {
#pragma omp for schedule(static)
  for (int i = 0; i < rows * linear.in; ++i) room.raised[i] = room.rows[i] ^ 0x80;
#pragma omp for schedule(static)
  for (int32_t start = 0; start < linear.out; start += kLanes) {  // a cache line of each row
    for (int r = 0; r < rows; r += kTogether) {
      const int together = std::min(kTogether, rows - r);
      const uint8_t* some = room.raised + r * linear.in;
      alignas(64) int32_t line[kTogether * kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const int8_t* weight = linear.weight + int64_t{start + i} * linear.in;
        const int32_t shift = linear.shift[start + i];
        switch (together) {
#define STEMMA_FEW(R) \
  case R: multiply<R>(weight, shift, some, linear.in, line + i, kLanes); break;
          STEMMA_FEW(1)
          STEMMA_FEW(2)
          STEMMA_FEW(3)
          STEMMA_FEW(4)
          STEMMA_FEW(5)
          STEMMA_FEW(6)
          STEMMA_FEW(7)
          STEMMA_FEW(8)
#undef STEMMA_FEW
        }
      }
      for (int i = 0; i < together; ++i)
        std::memcpy(room.product + int64_t{r + i} * linear.out + start, line + i * kLanes,
                    sizeof(int32_t) * kLanes);
    }
  }
}

void add_norm(float* x, const Linear& linear, const Room& room, int rows, float eps) {
#pragma omp for schedule(static)
  for (int r = 0; r < rows; ++r)
    room.step[r] = add_norm_quantise(x + r * linear.out, room.product + r * linear.out,
                                     room.step[r], linear.scale, linear.bias, linear.out, eps,
                                     room.buffer + r * linear.out, room.rows + r * linear.out);
}

// x += out(attended), then x += the MLP of x. By all threads of a team.
void finish(const Between& w, float* x, const float* attended, const Room& room, int rows) {
#pragma omp for schedule(static)
  for (int r = 0; r < rows; ++r)
    room.step[r] =
        quantise(attended + r * w.out.in, w.out.in, room.rows + int64_t{r} * w.out.in);
  multiply(w.out, room, rows);
  add_norm(x, w.out, room, rows, w.eps);
  multiply(w.gate_up, room, rows);
  const int inner = w.down.in;
#pragma omp for schedule(static)
  for (int r = 0; r < rows; ++r)
    room.step[r] = gate_quantise(room.product + r * 2 * inner, room.step[r], w.gate_up.scale,
                                 w.gate_up.bias, inner, w.block, room.buffer + r * inner,
                                 room.rows + r * inner);
  multiply(w.down, room, rows);
  add_norm(x, w.down, room, rows, w.eps);
}

}  // namespace
}  // namespace stemma

#define STEMMA_ROWS _Pragma("omp parallel for schedule(static) num_threads(threads) if (rows > 3)") \
  for (int64_t row = 0; row < rows; ++row)

// x: [rows, width], rows `stride` floats apart -> to int8 [rows, width], step [rows].
extern "C" void stemma_quantise(const float* x, int64_t stride, int64_t rows, int width,
                                int8_t* to, float* step, int threads) {
  STEMMA_ROWS step[row] = stemma::quantise(x + row * stride, width, to + row * width);
}

// x: [rows, width], changed in place. product: int32 [rows, width], of rows worth step[row], or null.
// to: int8 [rows, width], step [rows] (overwritten), normed: [rows, width].
extern "C" void stemma_add_norm_quantise(float* x, const int32_t* product, float* step,
                                         const float* scale, const float* bias, int64_t rows,
                                         int width, float eps, float* normed, int8_t* to,
                                         int threads) {
  STEMMA_ROWS step[row] = stemma::add_norm_quantise(
      x + row * width, product ? product + row * width : nullptr, step[row], scale, bias, width,
      eps, normed + row * width, to + row * width);
}

// product: int32 [rows, 2 * width], gate beside up. to: int8 [rows, width]. block: of the Hadamard
// matrix, a power of two that divides width.
extern "C" void stemma_gate_quantise(const int32_t* product, float* step, const float* scale,
                                     const float* bias, int64_t rows, int width, int block,
                                     float* buffer, int8_t* to, int threads) {
  STEMMA_ROWS step[row] =
      stemma::gate_quantise(product + row * 2 * width, step[row], scale, bias, width, block,
                            buffer + row * width, to + row * width);
}

// product: int32 [rows, width], heads of q, k and v side by side; the first `turned` columns are q
// and k. cosine, sine: [rows, dim]. to: [rows, width].
extern "C" void stemma_rotate(const int32_t* product, const float* step, const float* scale,
                              const float* bias, int64_t rows, int width, int turned, int dim,
                              const float* cosine, const float* sine, float* to, int threads) {
  STEMMA_ROWS stemma::rotate(product + row * width, step[row], scale, bias, width, turned, dim,
                             cosine + row * dim, sine + row * dim, to + row * width);
}

// product: int32 [rows, width] -> floats, which may take its place.
extern "C" void stemma_dequantise(const int32_t* product, const float* step, const float* scale,
                                  const float* bias, int64_t rows, int width, float* to,
                                  int threads) {
  STEMMA_ROWS stemma::dequantise(product + row * width, step[row], scale, bias, width,
                                 to + row * width);
}

// All of a layer's way to the next attention in one call, for at most `stemma_few()` rows: their
// products read each weight once, and nothing goes back and forth. x: [rows, hidden], changed in
// place; attended: [rows, heads * dim], dense. qkv: [rows, w->qkv.out].
extern "C" void stemma_between_few(const stemma::Between* w, const stemma::Room* room, float* x,
                                   const float* attended, const float* cosine, const float* sine,
                                   float* qkv, int rows, int threads) {
#pragma omp parallel num_threads(threads)
  {
    stemma::finish(*w, x, attended, *room, rows);
    stemma::multiply(w->qkv, *room, rows);
#pragma omp for schedule(static)
    for (int r = 0; r < rows; ++r)
      stemma::rotate(room->product + r * w->qkv.out, room->step[r], w->qkv.scale, w->qkv.bias,
                     w->qkv.out, w->turned, w->dim, cosine + r * w->dim, sine + r * w->dim,
                     qkv + r * w->qkv.out);
  }
}

// A linear map of few rows. x: [rows, in] -> to: [rows, out], which also serves for the products.
extern "C" void stemma_linear_few(const stemma::Linear* linear, const stemma::Room* room,
                                  const float* x, float* to, int rows, int threads) {
  stemma::Room own = *room;
  own.product = reinterpret_cast<int32_t*>(to);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int r = 0; r < rows; ++r)
      own.step[r] = stemma::quantise(x + r * linear->in, linear->in, own.rows + r * linear->in);
    stemma::multiply(*linear, own, rows);
    constexpr int kPart = 1024;
    const int parts = (linear->out + kPart - 1) / kPart;
#pragma omp for schedule(static)
    for (int i = 0; i < rows * parts; ++i) {
      const int r = i / parts, start = i % parts * kPart;
      const int64_t at = int64_t{r} * linear->out + start;
      const float* bias = linear->bias ? linear->bias + start : nullptr;
      stemma::dequantise(own.product + at, own.step[r], linear->scale + start, bias,
                         std::min(kPart, linear->out - start), to + at);
    }
  }
}

// A linear map of few rows in floats. x: [rows, width] dense, weight: [outputs, width] -> to: [rows,
// outputs]. width: a multiple of 16.
extern "C" void stemma_float_linear_few(const float* x, const float* weight, const float* bias,
                                        int rows, int width, int outputs, float* to, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int32_t o = 0; o < outputs; ++o) {
    const float* w = weight + int64_t{o} * width;
    const float more = bias ? bias[o] : 0.0f;
    switch (rows) {
#define STEMMA_FEW(R) \
  case R: stemma::multiply<R>(w, x, width, more, to + o, outputs); break;
      STEMMA_FEW(1)
      STEMMA_FEW(2)
      STEMMA_FEW(3)
      STEMMA_FEW(4)
      STEMMA_FEW(5)
      STEMMA_FEW(6)
      STEMMA_FEW(7)
      STEMMA_FEW(8)
#undef STEMMA_FEW
    }
  }
}

extern "C" int stemma_few() { return stemma::kFew; }

extern "C" int stemma_few_floats() { return stemma::kTogether; }
