// Masks of constrained draws, put onto logits. Called by masks.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

// Most words of a mask are all ones or all zeros.
void lower(float* logits, const uint8_t* bits, int64_t size) {
  for (int64_t at = 0; at < size; at += 64) {
    const int64_t here = std::min<int64_t>(64, size - at);
    uint64_t word = 0;
    std::memcpy(&word, bits + at / 8, (here + 7) / 8);
    if (word == 0) {
      std::fill(logits + at, logits + at + here, kNever);
    } else if (word != ~uint64_t{0}) {
      for (int64_t i = 0; i < here; ++i) {
        if (!(word >> i & 1)) logits[at + i] = kNever;
      }
    }
  }
}

}  // namespace

// logits: [any, size] dense. rows: [count], those that get a mask. bits: [count, length] bytes, one
// bit for each logit, the lowest first; a logit whose bit is 0 becomes -infinity.
extern "C" void stemma_mask(float* logits, int64_t size, const int64_t* rows, int64_t count,
                            const uint8_t* bits, int64_t length) {
  for (int64_t i = 0; i < count; ++i) lower(logits + rows[i] * size, bits + i * length, size);
}
