// Indices in a message: numbers of `width` bits without gaps, lowest bits first, or a bitmap of the row (width 0).

#pragma once

#include <cstdint>
#include <cstring>

#ifdef __BMI2__
#include <immintrin.h>
#endif

#include "lanes.h"

namespace {

// Convert eight numbers of `width` bits (up to 8) between a word without gaps and a word with one byte per number.
INLINE uint64_t unpack_eight(uint64_t word, int width) {
  const uint64_t mask = 0x0101010101010101u * ((1u << width) - 1);
#ifdef __BMI2__
  return _pdep_u64(word, mask);
#else
  uint64_t bytes = 0;
  for (int i = 0; i < 8; ++i) bytes |= (word >> i * width & mask & 0xff) << 8 * i;
  return bytes;
#endif
}

INLINE uint64_t pack_eight(uint64_t bytes, int width) {
#ifdef __BMI2__
  return _pext_u64(bytes, 0x0101010101010101u * ((1u << width) - 1));
#else
  uint64_t word = 0;
  for (int i = 0; i < 8; ++i) word |= (bytes >> 8 * i & 0xff) << i * width;
  return word;
#endif
}

class Packer {
 public:
  Packer(uint8_t *to, int64_t bytes) : to_(to), end_(to + bytes) {}
  ~Packer() {
    for (; bits_ > 0; bits_ -= 8, held_ >>= 8) *to_++ = uint8_t(held_);
  }

  INLINE void put(uint32_t number, int width) {  // width up to 32
    held_ |= uint64_t(number) << bits_;
    bits_ += width;
    if (bits_ >= 32) {
      std::memcpy(to_, &held_, 4);
      to_ += 4;
      held_ >>= 32;
      bits_ -= 32;
    }
  }

  // Packs `count` numbers below 2**width, each read from one byte; width up to 8.
  INLINE void put_bytes(const uint8_t *numbers, int64_t count, int width) {
    int64_t i = 0;
    if (!bits_)
      for (; i + 8 <= count && end_ - to_ >= 8; i += 8, to_ += width) {
        uint64_t eight;
        std::memcpy(&eight, numbers + i, 8);
        eight = pack_eight(eight, width);
        std::memcpy(to_, &eight, 8);  // the next write overwrites the excess bytes
      }
    for (; i < count; ++i) put(numbers[i], width);
  }

 private:
  uint8_t *to_, *end_;
  uint64_t held_ = 0;
  int bits_ = 0;
};

class Unpacker {
 public:
  Unpacker(const uint8_t *from, int64_t bytes) : from_(from), end_(from + bytes) {}

  // Unpacks `count` numbers, each into one byte; width up to 8.
  INLINE void get_bytes(uint8_t *numbers, int64_t count, int width) {
    int64_t i = 0;
    if (!bits_)
      for (; i + 8 <= count && end_ - from_ >= 8; i += 8, from_ += width) {
        uint64_t eight;
        std::memcpy(&eight, from_, 8);
        eight = unpack_eight(eight, width);
        std::memcpy(numbers + i, &eight, 8);
      }
    for (; i < count; ++i) numbers[i] = uint8_t(get(width));
  }

  INLINE uint32_t get(int width) {  // up to 32
    if (bits_ < width) {
      if (end_ - from_ >= 4) {
        uint32_t more;
        std::memcpy(&more, from_, 4);
        held_ |= uint64_t(more) << bits_;
        from_ += 4;
        bits_ += 32;
      } else {
        for (; bits_ < width && from_ < end_; bits_ += 8) held_ |= uint64_t(*from_++) << bits_;
      }
    }
    const uint32_t number = uint32_t(held_ & ((uint64_t(1) << width) - 1));
    held_ >>= width;
    bits_ -= width;
    return number;
  }

 private:
  const uint8_t *from_, *end_;
  uint64_t held_ = 0;
  int bits_ = 0;
};

// The bitmap of one row.
template <int N> struct RowBitmap {
  static constexpr int BITS = N < 32 ? N : 32, WORDS = N / BITS;
  uint32_t word[WORDS];
  RowBitmap() = default;
  explicit RowBitmap(Unpacker &from) {
    for (uint32_t &w : word) w = from.get(BITS);
  }
  RowBitmap(const uint8_t *index, int k) : word{} {
    for (int j = 0; j < k; ++j) word[index[j] / 32] |= uint32_t(1) << index[j] % 32;
  }
  uint16_t at(int index) const { return uint16_t(word[index / 32] >> index % 32); }  // 16 bits from `index` on
};

// Writes the first k indices that the bitmap marks, in order, then zeros if it marks fewer.
template <int N> INLINE void marked_indices(const RowBitmap<N> &marks, int k, uint8_t *index) {
  int w = 0;
  uint64_t left = marks.word[0];
  if constexpr (N == 64) left |= uint64_t(marks.word[1]) << 32;
  for (int j = 0; j < k; ++j) {
    if constexpr (N > 64)
      while (!left && w + 1 < RowBitmap<N>::WORDS) left = marks.word[++w];
    index[j] = left ? uint8_t(32 * w + __builtin_ctzll(left)) : 0;
    left &= left - 1;
  }
}

}  // namespace
