// Attention of rows with few keys of their own, read where they lie in the KV pool.
//
// Continues a softmax: `out` and `lse` hold what a row has attended to so far (lse -1e30: nothing
// yet) and hold that and the keys given here afterwards. One pass over the keys in blocks with a
// running maximum (Milakov & Gimelshein 2018). Called by ragged.py, once per layer and step.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kBlock = 32;      // keys whose scores are held at once
constexpr int kMaxGroup = 16;   // query heads that share a KV head, at most at once
constexpr int kMaxDim = 256;

// e^x for x <= 0 to 2 units in the last place; written out so that the compiler can vectorise it.
inline float exp_of(float x) {
  x = std::max(x, -87.0f);
  const float n = std::nearbyint(x * 1.44269504088896341f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

struct Pool {
  const float* k;
  const float* v;
  int64_t slot_stride;  // floats from one slot to the next; heads lie side by side
};

// The query heads q[0..group) of one KV head of one row. D: dimensions, a constant where it can be.
template <int D>
void attend(const float* q, const Pool& pool, const int64_t* slots, int64_t count, int group,
            int dim, float scale, float* out, float* lse) {
  const int d = D ? D : dim;
  float scores[kMaxGroup][kBlock];
  float total[kMaxGroup], largest[kMaxGroup];
  for (int g = 0; g < group; ++g) {
    largest[g] = lse[g];
    total[g] = 1.0f;
  }
  for (int64_t start = 0; start < count; start += kBlock) {
    const int block = static_cast<int>(std::min<int64_t>(kBlock, count - start));
    for (int j = 0; j < block; ++j) {
      const float* key = pool.k + slots[start + j] * pool.slot_stride;
      for (int g = 0; g < group; ++g) {
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < d; ++i) sum += q[g * d + i] * key[i];
        scores[g][j] = sum * scale;
      }
    }
    for (int g = 0; g < group; ++g) {
      float top = largest[g];
      for (int j = 0; j < block; ++j) top = std::max(top, scores[g][j]);
      const float shrink = exp_of(largest[g] - top);
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int j = 0; j < block; ++j) sum += scores[g][j] = exp_of(scores[g][j] - top);
      total[g] = total[g] * shrink + sum;
      largest[g] = top;
      float* row = out + g * d;
#pragma omp simd
      for (int i = 0; i < d; ++i) row[i] *= shrink;
    }
    for (int j = 0; j < block; ++j) {
      const float* value = pool.v + slots[start + j] * pool.slot_stride;
      for (int g = 0; g < group; ++g) {
        const float weight = scores[g][j];
        float* row = out + g * d;
#pragma omp simd
        for (int i = 0; i < d; ++i) row[i] += weight * value[i];
      }
    }
  }
  for (int g = 0; g < group; ++g) {
    const float inverse = 1.0f / total[g];
    float* row = out + g * d;
#pragma omp simd
    for (int i = 0; i < d; ++i) row[i] *= inverse;
    lse[g] = largest[g] + std::log(total[g]);
  }
}

}  // namespace

// q: [rows, heads, dim], a row dense, rows `q_stride` floats apart. k, v: [slots, kv_heads, dim],
// slots `slot_stride` floats apart. row[i] sees slots[starts[i] .. starts[i + 1]). out: dense
// [rows, heads, dim]. lse: dense [rows, heads]. Returns 0, or 1 for a shape it has no room for.
extern "C" int stemma_ragged_attention(const float* q, int64_t q_stride, const float* k,
                                       const float* v, int64_t slot_stride, const int64_t* row,
                                       const int64_t* starts, const int64_t* slots, int64_t count,
                                       int heads, int kv_heads, int dim, float scale, float* out,
                                       float* lse, int threads) {
  const int group = heads / kv_heads;
  if (group > kMaxGroup || dim > kMaxDim) return 1;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t task = 0; task < count * kv_heads; ++task) {
    const int64_t i = task / kv_heads;
    const int64_t head = task % kv_heads;
    const Pool pool{k + head * dim, v + head * dim, slot_stride};
    const int64_t first = row[i] * heads + head * group;
    const float* query = q + row[i] * q_stride + head * group * dim;
    const int64_t* own = slots + starts[i];
    const int64_t length = starts[i + 1] - starts[i];
    float* to = out + first * dim;
    switch (dim) {
      case 64: attend<64>(query, pool, own, length, group, dim, scale, to, lse + first); break;
      case 128: attend<128>(query, pool, own, length, group, dim, scale, to, lse + first); break;
      default: attend<0>(query, pool, own, length, group, dim, scale, to, lse + first);
    }
  }
  return 0;
}
