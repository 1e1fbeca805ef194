// float32 linears of few rows: each weight is read from memory once. Called by linears.py.

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace stemma {
namespace {

constexpr int kFew = 64;    // rows up to which this is faster than a general product
constexpr int kChunk = 40;  // outputs whose weights stay in a near cache for all rows

// A tile is what is summed at once: as many sums as there are registers for.
#ifdef __AVX512F__
constexpr int kRows = 5, kOutputs = 5;
#else
constexpr int kRows = 2, kOutputs = 2;
#endif

// R rows times O rows of weights. Each sum in the same order in any tile.
template <int R, int O>
__attribute__((noinline)) void multiply(const float* rows, const float* weights, int width,
                                        const float* bias, float* to, int64_t stride) {
  Vec sums[R][O] = {};
  for (int i = 0; i < width; i += kLanes) {
    Vec w[O];
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) {
      w[o] = load(weights + int64_t{o} * width + i);
      __builtin_prefetch(weights + int64_t{o + O} * width + i);  // of the tile after this one
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec x = load(rows + int64_t{r} * width + i);
#pragma GCC unroll 8
      for (int o = 0; o < O; ++o) sums[r][o] += w[o] * x;
    }
  }
  for (int r = 0; r < R; ++r)
    for (int o = 0; o < O; ++o)
      to[r * stride + o] = sum_of(sums[r][o]) + (bias ? bias[o] : 0.0f);
}

// The tile of up to R rows; the sizes that a template has to be made for are counted down.
template <int R, int O>
void multiply_rows(int count, const float* rows, const float* weights, int width,
                   const float* bias, float* to, int64_t stride) {
  if (count >= R) {
    multiply<R, O>(rows, weights, width, bias, to, stride);
  } else if constexpr (R > 1) {
    multiply_rows<R - 1, O>(count, rows, weights, width, bias, to, stride);
  }
}

}  // namespace
}  // namespace stemma

// x: [rows, width] dense, weight: [outputs, width] -> to: [rows, outputs]. width: a multiple of 16.
extern "C" void stemma_float_linear_few(const float* x, const float* weight, const float* bias,
                                        int rows, int width, int outputs, float* to, int threads) {
  using namespace stemma;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int first = 0; first < outputs; first += kChunk) {
    const int end = std::min(first + kChunk, outputs);
    for (int r = 0; r < rows; r += kRows) {
      const int count = std::min(kRows, rows - r);
      const float* own = x + int64_t{r} * width;
      for (int o = first; o < end;) {
        const float* w = weight + int64_t{o} * width;
        const float* more = bias ? bias + o : nullptr;
        float* into = to + int64_t{r} * outputs + o;
        if (o + kOutputs <= end) {
          multiply_rows<kRows, kOutputs>(count, own, w, width, more, into, outputs);
          o += kOutputs;
        } else {
          multiply_rows<kRows, 1>(count, own, w, width, more, into, outputs);
          o += 1;
        }
      }
    }
  }
}

extern "C" int stemma_few_floats() { return stemma::kFew; }
