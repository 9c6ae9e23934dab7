// Values as signs: one bit each, and the mean magnitude of each block in bf16 (`codebooks.Sign`).

#pragma once

#include "lanes.h"

namespace {

constexpr int BLOCK = 1024;  // number of values that share one magnitude

// Encodes values as signs, block by block; `add` takes any number of values.
class SignWriter {
 public:
  SignWriter(uint8_t *codes, uint8_t *statistics, bool negative_zeros)
      : codes_(codes), statistics_(statistics), negative_zeros_(negative_zeros) {}

  void add(const float *values, int count) {
    while (count) {
      const int some = count < BLOCK - held_ ? count : BLOCK - held_;
      std::memcpy(block_ + held_, values, size_t(some) * sizeof(float));
      values += some, count -= some, held_ += some;
      if (held_ == BLOCK) write();
    }
  }

  void finish() {
    if (!held_) return;
    std::memset(block_ + held_, 0, size_t(BLOCK - held_) * sizeof(float));
    write();
  }

 private:
  static constexpr int SUMS = 64;  // partial sums of magnitudes, in the order of torch with AVX-512
  alignas(64) float block_[BLOCK];
  int held_ = 0;
  uint8_t *codes_, *statistics_;
  const bool negative_zeros_;

  void write() {
    const float magnitude = sum() / float(held_), zero = magnitude * 0x1p-18f;
    const Floats least = Floats{} + (negative_zeros_ ? zero : -zero);
    uint8_t code[BLOCK / 8];
    for (int i = 0; i < BLOCK; i += LANES) {
      const Floats v = load(block_ + i);
      put(code, i, negative_zeros_ ? v <= least : v < least);
    }
    if (held_ % 8) code[held_ / 8] &= uint8_t((1 << held_ % 8) - 1);
    std::memcpy(codes_, code, size_t(held_ + 7) / 8);
    codes_ += (held_ + 7) / 8;
    uint32_t bits;
    std::memcpy(&bits, &magnitude, sizeof bits);
    const uint16_t half = magnitude == magnitude ? uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : 0x7fc0;
    std::memcpy(statistics_, &half, sizeof half);
    statistics_ += sizeof half;
    held_ = 0;
  }

  static INLINE void put(uint8_t *code, int at, Ints negative) {
#ifdef __AVX512F__
    const uint16_t marks = _mm512_test_epi32_mask(__m512i(negative), __m512i(negative));
    std::memcpy(code + at / 8, &marks, sizeof marks);
#else
    if (at % 8 == 0) code[at / 8] = 0;
    for (int lane = 0; lane < LANES; ++lane) code[at / 8] |= uint8_t((negative[lane] & 1) << (at % 8 + lane));
#endif
  }

  float sum() const {
    float sums[SUMS] = {}, total = 0;
    for (int i = 0; i < BLOCK; i += SUMS)
      for (int j = 0; j < SUMS; ++j) sums[j] += __builtin_fabsf(block_[i + j]);
    for (int lane = 0; lane < 16; ++lane) total += sums[lane] + sums[16 + lane] + sums[32 + lane] + sums[48 + lane];
    return total;
  }
};

// Decodes the `count` values from number `first`, a multiple of LANES, on. Writes whole vectors, so
// `values` may need up to LANES - 1 more numbers.
INLINE void signed_values(const uint8_t *codes, const float *magnitudes, int64_t first, int count, float *values) {
  Ints bit;
  for (int lane = 0; lane < LANES; ++lane) bit[lane] = 1 << lane;
  for (int i = 0; i < count; i += LANES) {
    const int64_t at = first + i;
    int marks = codes[at / 8] >> at % 8;
    if (LANES == 16 && count - i > 8) marks |= codes[at / 8 + 1] << 8;
    const Ints negative = ((Ints{} + marks) & bit) != 0, sign = bits(-Floats{}) & negative;
    const Ints number = bits(Floats{} + magnitudes[at / BLOCK]) ^ sign;
    std::memcpy(values + i, &number, sizeof number);
  }
}

}  // namespace
