// Rows of bytes times int8 weights, exact in int32: on AMX tiles, on the dot products of VNNI, on
// AVX2, or in plain C++. Exact means that every way gives the same bits, and so does every batch.
//
// Weights lie in panels of 16 outputs, [in / 4][16][4]: four inputs of each output side by side, as
// the instructions want them. Rows are raised by kRaise, for some of them multiply unsigned by
// signed bytes; sums begin with what takes that off again.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "vectors.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif
#if defined(__AMX_INT8__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define STEMMA_AMX
#endif

namespace stemma {

constexpr int kPanel = kLanes;  // outputs

typedef int32_t UnalignedIntVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

// A linear map: packed weights, what the sums begin with, and what makes floats of them.
struct Linear {
  const int8_t* weight;
  const int32_t* begin;
  const float* scale;
  const float* bias;
  int32_t in, out;
};

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(STEMMA_AMX)
constexpr int kRaise = 128;
#else
constexpr int kRaise = 0;
#endif

inline int32_t four_bytes(const uint8_t* from) {
  int32_t bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return bytes;
}

// Of each way: Weights, four inputs of a panel; Inputs, four of a row for all of its outputs; Sums
// of a panel; and `plus`, the sums with the products of both.
#if defined(__AVX512VNNI__)
typedef __m512i Weights;
typedef __m512i Inputs;
typedef __m512i Sums;
inline Weights weights_at(const int8_t* from) { return _mm512_loadu_si512(from); }
inline Inputs inputs_at(const uint8_t* from) { return _mm512_set1_epi32(four_bytes(from)); }
inline Sums sums_at(const int32_t* from) { return _mm512_loadu_si512(from); }
inline void store(int32_t* to, Sums x) { _mm512_storeu_si512(to, x); }
inline Sums plus(Sums sums, Weights w, Inputs x) { return _mm512_dpbusd_epi32(sums, x, w); }
#elif defined(__AVX2__)
struct Weights {
  __m256i low, high;
};
typedef Weights Sums;
inline __m256i half_at(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
inline Weights weights_at(const int8_t* from) { return {half_at(from), half_at(from + 32)}; }
inline Sums sums_at(const int32_t* from) { return {half_at(from), half_at(from + 8)}; }
inline void store(int32_t* to, Sums x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x.low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8), x.high);
}
#ifdef __AVXVNNI__
typedef __m256i Inputs;
inline Inputs inputs_at(const uint8_t* from) { return _mm256_set1_epi32(four_bytes(from)); }
inline Sums plus(Sums sums, Weights w, Inputs x) {
  return {_mm256_dpbusd_avx_epi32(sums.low, x, w.low),
          _mm256_dpbusd_avx_epi32(sums.high, x, w.high)};
}
#else
inline __m256i evens(__m256i x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
inline __m256i odds(__m256i x) { return _mm256_srai_epi16(x, 8); }
struct Inputs {
  __m256i even, odd;
};
inline Inputs inputs_at(const uint8_t* from) {
  const __m256i x = _mm256_set1_epi32(four_bytes(from));
  return {evens(x), odds(x)};
}
inline __m256i plus(__m256i sums, __m256i w, Inputs x) {
  return _mm256_add_epi32(sums, _mm256_add_epi32(_mm256_madd_epi16(evens(w), x.even),
                                                 _mm256_madd_epi16(odds(w), x.odd)));
}
inline Sums plus(Sums sums, Weights w, Inputs x) {
  return {plus(sums.low, w.low, x), plus(sums.high, w.high, x)};
}
#endif
#else
struct Weights {
  const int8_t* at;
};
typedef IntVec Sums;
typedef int32_t Inputs;
inline Weights weights_at(const int8_t* from) { return {from}; }
inline Inputs inputs_at(const uint8_t* from) { return four_bytes(from); }
inline Sums sums_at(const int32_t* from) {
  return *reinterpret_cast<const UnalignedIntVec*>(from);
}
inline void store(int32_t* to, Sums x) { *reinterpret_cast<UnalignedIntVec*>(to) = x; }
inline Sums plus(Sums sums, Weights w, Inputs x) {
  int8_t inputs[4];
  std::memcpy(inputs, &x, sizeof inputs);
  for (int o = 0; o < kPanel; ++o)
    for (int i = 0; i < 4; ++i)
      sums[o] += w.at[4 * o + i] * (kRaise ? static_cast<uint8_t>(inputs[i]) : inputs[i]);
  return sums;
}
#endif

// Rows and panels whose sums are kept in registers at once.
#if defined(__AVX512VNNI__)
constexpr int kTileRows = 8, kTilePanels = 3;
#else
constexpr int kTileRows = 4, kTilePanels = 1;
#endif

template <typename Work, int... I>
__attribute__((always_inline)) inline void spelled_out(std::integer_sequence<int, I...>,
                                                       Work work) {
  (work(std::integral_constant<int, I>{}), ...);
}

// work(0), work(1), ... work(N - 1), each number a constant, so that arrays become registers.
template <int N, typename Work>
__attribute__((always_inline)) inline void times(Work work) {
  spelled_out(std::make_integer_sequence<int, N>{}, work);
}

// [R] rows times [P] panels.
template <int R, int P>
void multiply_tile(const Linear& linear, int panel, const uint8_t* rows, int32_t* product) {
  const int64_t in = linear.in;
  const int8_t* weight = linear.weight + panel * kPanel * in;
  Sums sums[R][P];
  times<R * P>([&](auto i) {
    sums[i / P][i % P] = sums_at(linear.begin + (panel + i % P) * kPanel);
  });
  for (int64_t i = 0; i < in; i += 4) {
    Weights w[P];
    times<P>([&](auto p) { w[p] = weights_at(weight + (p * in + i) * kPanel); });
    times<R>([&](auto r) {
      const Inputs x = inputs_at(rows + r * in + i);
      times<P>([&](auto p) { sums[r][p] = plus(sums[r][p], w[p], x); });
    });
  }
  times<R * P>([&](auto i) {
    store(product + i / P * int64_t{linear.out} + (panel + i % P) * kPanel, sums[i / P][i % P]);
  });
}

// The tile of up to R rows; the sizes that a template has to be made for are counted down.
template <int R, int P>
void multiply_rows(const Linear& linear, int panel, const uint8_t* rows, int count,
                   int32_t* product) {
  if (count >= R) {
    multiply_tile<R, P>(linear, panel, rows, product);
  } else if constexpr (R > 1) {
    multiply_rows<R - 1, P>(linear, panel, rows, count, product);
  }
}

template <int P>
void multiply_panels(const Linear& linear, int panel, const uint8_t* rows, int count,
                     int32_t* product) {
  for (int r = 0; r < count; r += kTileRows)
    multiply_rows<kTileRows, P>(linear, panel, rows + int64_t{r} * linear.in, count - r,
                                product + int64_t{r} * linear.out);
}

constexpr int kTileHeight = 16;  // rows of an AMX tile: what rows and products must have room for

#ifdef STEMMA_AMX

// Below so many rows the tiles would be mostly empty.
constexpr int kTiledRows = 5;

// Whether the kernel lets this process use tiles.
inline bool tiles_allowed() {
  constexpr long kAskForPermission = 0x1023, kTileData = 18;
  static const bool allowed = syscall(SYS_arch_prctl, kAskForPermission, kTileData) == 0;
  return allowed;
}

// A thread's tiles, set up for blocks of 16 by 64 bytes as long as this lives.
class Tiles {
 public:
  Tiles() {
    struct {
      uint8_t palette = 1, first = 0, reserved[14] = {};
      uint16_t width[16] = {};
      uint8_t height[16] = {};
    } shape;
    std::fill_n(shape.width, 8, 64);
    std::fill_n(shape.height, 8, kTileHeight);
    _tile_loadconfig(&shape);
  }
  ~Tiles() { _tile_release(); }
};

// Up to 32 rows times two panels. Tiles 0 to 3: sums; 4 and 5: rows; 6 and 7: weights.
template <bool kTwo>
void multiply_tiles(const Linear& linear, int panel, const uint8_t* rows, int32_t* product) {
  const int64_t in = linear.in, out = linear.out;
  const int8_t* weight = linear.weight + panel * kPanel * in;
  const int32_t* begin = linear.begin + panel * kPanel;
  _tile_loadd(0, begin, 0);  // the same for each row
  _tile_loadd(1, begin + kPanel, 0);
  if (kTwo) {
    _tile_loadd(2, begin, 0);
    _tile_loadd(3, begin + kPanel, 0);
  }
  for (int64_t i = 0; i < in; i += 64) {
    _tile_loadd(6, weight + i * kPanel, 64);
    _tile_loadd(7, weight + (in + i) * kPanel, 64);
    _tile_loadd(4, rows + i, in);
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    if (kTwo) {
      _tile_loadd(5, rows + kTileHeight * in + i, in);
      _tile_dpbusd(2, 5, 6);
      _tile_dpbusd(3, 5, 7);
    }
  }
  int32_t* to = product + panel * kPanel;
  _tile_stored(0, to, sizeof(int32_t) * out);
  _tile_stored(1, to + kPanel, sizeof(int32_t) * out);
  if (kTwo) {
    _tile_stored(2, to + kTileHeight * out, sizeof(int32_t) * out);
    _tile_stored(3, to + kTileHeight * out + kPanel, sizeof(int32_t) * out);
  }
}

#endif

// Panels [first, last) for `count` rows. rows, product: with room up to a multiple of 16 rows.
inline void multiply_part(const Linear& linear, int first, int last, const uint8_t* rows,
                          int count, int32_t* product) {
  int panel = first;
#ifdef STEMMA_AMX
  if (count >= kTiledRows && linear.in % 64 == 0 && tiles_allowed()) {
    const Tiles tiles;
    for (; panel + 2 <= last; panel += 2) {
      int r = 0;
      for (; r + kTileHeight < count; r += 2 * kTileHeight)
        multiply_tiles<true>(linear, panel, rows + int64_t{r} * linear.in,
                             product + int64_t{r} * linear.out);
      if (r < count)
        multiply_tiles<false>(linear, panel, rows + int64_t{r} * linear.in,
                              product + int64_t{r} * linear.out);
    }
  }
#endif
  for (; panel + kTilePanels <= last; panel += kTilePanels)
    multiply_panels<kTilePanels>(linear, panel, rows, count, product);
  for (; panel < last; ++panel) multiply_panels<1>(linear, panel, rows, count, product);
}

}  // namespace stemma
