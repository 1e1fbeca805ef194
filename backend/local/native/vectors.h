// Sixteen floats at a time, for any processor that GCC or Clang compile for.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace stemma {

constexpr int kLanes = 16;

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef float UnalignedVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

inline Vec load(const float* from) { return *reinterpret_cast<const UnalignedVec*>(from); }
inline void store(float* to, Vec x) { *reinterpret_cast<UnalignedVec*>(to) = x; }

// A bfloat16: the upper half of a float.
struct Half {
  uint16_t bits;
};

typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
typedef uint32_t UnsignedVec __attribute__((vector_size(4 * kLanes)));

inline Vec load(const Half* from) {
  const auto bits =
      __builtin_convertvector(*reinterpret_cast<const HalfVec*>(from), UnsignedVec) << 16;
  Vec x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// To the nearest, of two that are as near to the even one. NaN stays NaN.
inline void store(Half* to, Vec x) {
  UnsignedVec bits;
  std::memcpy(&bits, &x, sizeof bits);
  const UnsignedVec nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const UnsignedVec chosen = x == x ? nearest : bits >> 16 | 0x40;
  *reinterpret_cast<HalfVec*>(to) = __builtin_convertvector(chosen, HalfVec);
}

inline Vec all(float x) { return x - Vec{}; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// Lane i of the result: lane from[i] of x, or of y for numbers from 16 on.
template <typename From>
inline Vec picked(Vec x, Vec y, From from) {
  IntVec lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = from(i);
#ifdef __clang__
  Vec to;
  for (int i = 0; i < kLanes; ++i) to[i] = lanes[i] < kLanes ? x[lanes[i]] : y[lanes[i] - kLanes];
  return to;
#else
  return __builtin_shuffle(x, y, lanes);
#endif
}

// Each lane with the one that is H away.
template <int H>
inline Vec across(Vec x) {
  return picked(x, x, [](int i) { return i ^ H; });
}

// By halves, always in the same order.
inline float sum_of(Vec x) {
  x += across<8>(x);
  x += across<4>(x);
  x += across<2>(x);
  x += across<1>(x);
  return x[0];
}

inline float largest_of(Vec x) {
  x = larger(x, across<8>(x));
  x = larger(x, across<4>(x));
  x = larger(x, across<2>(x));
  x = larger(x, across<1>(x));
  return x[0];
}

inline bool any_above(Vec x, float limit) {
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GT_OQ);
#else
  return largest_of(x) > limit;
#endif
}

// Of a transpose of 16 by 16: swap the blocks of H rows and lanes that lie across the diagonal.
template <int H>
inline void swap_blocks(Vec* rows) {
  for (int i = 0; i < kLanes; ++i)
    if (!(i & H)) {
      const Vec a = rows[i], b = rows[i + H];
      rows[i] = picked(a, b, [](int lane) { return lane & H ? lane - H + kLanes : lane; });
      rows[i + H] = picked(a, b, [](int lane) { return lane & H ? lane + kLanes : lane + H; });
    }
}

inline void transpose(Vec* rows) {
  swap_blocks<8>(rows);
  swap_blocks<4>(rows);
  swap_blocks<2>(rows);
  swap_blocks<1>(rows);
}

// e^x to 2 units in the last place, for x up to 88; smaller than -87 counts as -87. NaN stays NaN.
inline Vec exp_of(Vec x) {
  x = x < all(-87.0f) ? all(-87.0f) : x;
  const Vec shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec n = (x * 1.44269504088896341f + shift) - shift;
  const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const IntVec bits = (__builtin_convertvector(n, IntVec) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

inline float exp_of(float x) { return exp_of(all(x))[0]; }

}  // namespace stemma
