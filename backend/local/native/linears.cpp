// float32 linears of few rows, each weight read once. Called by linears.py.

#include <cstdint>

#include "vectors.h"

namespace stemma {
namespace {

constexpr int kFew = 8;  // rows up to which this is faster than a general product

// [R] rows times one row of weights. Each sum in the same order for any R.
template <int R>
__attribute__((noinline)) void multiply(const float* weight, const float* rows, int width,
                                        float bias, float* to, int64_t stride) {
  Vec sums[R] = {};
  for (int i = 0; i < width; i += kLanes) {
    const Vec w = load(weight + i);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r] += w * load(rows + r * width + i);
  }
  for (int r = 0; r < R; ++r) to[r * stride] = sum_of(sums[r]) + bias;
}

}  // namespace
}  // namespace stemma

// x: [rows, width] dense, weight: [outputs, width] -> to: [rows, outputs]. width: a multiple of 16.
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

extern "C" int stemma_few_floats() { return stemma::kFew; }
