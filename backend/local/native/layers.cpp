// What lies between the integer products of a decoder layer, one pass over each row.
//
// A product of int8 rows and int8 weights is exact in int32, and each row is worked on by itself:
// its result has the same bits whatever else is in the batch. `step` is what one unit of a
// quantised row is worth, `scale` what one unit of an output channel of the weights is.
// Called by layers.py.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace stemma {
namespace {

constexpr float kSteps = 127.0f;
constexpr float kLeast = 1e-30f;  // stands for the largest value of a row of zeros

// [width] floats to int8; returns what a unit is worth: NaN if one of them is not finite, for an
// integer cannot tell. width: a multiple of 16.
float quantise(const float* x, int width, int8_t* to) {
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
float add_norm_quantise(float* x, const int32_t* product, float step, const float* scale,
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
float gate_quantise(const int32_t* product, float step, const float* scale, const float* bias,
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
void dequantise(const int32_t* product, float step, const float* scale, const float* bias,
                int width, float* to) {
  for (int i = 0; i < width; i += kLanes) store(to + i, value(product, step, scale, bias, i));
}

// The product as floats; heads of `dim` up to column `turned` are rotated by the row's angle.
void rotate(const int32_t* product, float step, const float* scale, const float* bias, int width,
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
