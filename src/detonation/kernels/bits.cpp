// Whole numbers packed without gaps, lowest bits first, and bitmaps of columns. Exact: no machine rounds differently.

#include <cstdint>
#include <cstring>

#include "columns.h"

namespace {

// Whether in each row every column is larger than the one before, and below `chunk`; columns of up to 8 bits. Some rows
// at a time, a byte each, so that vectors can look at them.
int check_bytes(Unpacker columns, int64_t rows, int kept, int chunk, int width) {
  constexpr int ROOM = 4096;
  uint8_t column[ROOM + 1] = {}, inside[ROOM];
  const int some = ROOM / kept & ~7;  // rows, so that each time begins with a whole byte
  for (int i = 0; i < some * kept; ++i) inside[i] = i % kept != kept - 1;
  uint8_t most = 0, fall = 0;
  for (int64_t r = 0; r < rows; r += some) {
    const int count = int(rows - r < some ? rows - r : some) * kept;
    columns.get_bytes(column, count, width);
    for (int i = 0; i < count; ++i) {
      most = column[i] > most ? column[i] : most;
      fall |= uint8_t(column[i] >= column[i + 1]) & inside[i];
    }
  }
  return most >= chunk ? 1 : fall ? 2 : 0;
}

}  // namespace

extern "C" {

void detonation_pack(const int64_t *numbers, int64_t count, int width, uint8_t *packed) {
  uint64_t held = 0;
  int bits = 0;
  for (int64_t i = 0; i < count; ++i) {
    held |= uint64_t(numbers[i]) << bits;
    for (bits += width; bits >= 8; bits -= 8, held >>= 8) *packed++ = uint8_t(held);
  }
  if (bits) *packed = uint8_t(held);
}

void detonation_unpack(const uint8_t *packed, int64_t count, int width, int64_t *numbers) {
  const uint64_t mask = (uint64_t(1) << width) - 1;
  uint64_t held = 0;
  int bits = 0;
  for (int64_t i = 0; i < count; ++i) {
    for (; bits < width; bits += 8) held |= uint64_t(*packed++) << bits;
    numbers[i] = int64_t(held & mask);
    held >>= width;
    bits -= width;
  }
}

void detonation_mark(const int64_t *columns, int64_t rows, int kept, int chunk, uint8_t *bitmap) {
  std::memset(bitmap, 0, size_t((rows * chunk + 7) / 8));
  for (int64_t i = 0; i < rows * kept; ++i) {
    const int64_t bit = i / kept * chunk + columns[i];
    bitmap[bit >> 3] |= uint8_t(1 << (bit & 7));
  }
}

// Never more than `kept` of a row, whatever the bitmap says; missing ones are 0.
void detonation_marked(const uint8_t *bitmap, int64_t rows, int kept, int chunk, int64_t *columns) {
  for (int64_t r = 0; r < rows; ++r) {
    int found = 0;
    if (chunk % 8 == 0) {
      const uint8_t *row = bitmap + r * chunk / 8;
      for (int byte = 0; byte < chunk / 8; ++byte)
        for (unsigned left = row[byte]; left && found < kept; left &= left - 1)
          columns[r * kept + found++] = 8 * byte + __builtin_ctz(left);
    } else {
      for (int64_t bit = r * chunk; bit < (r + 1) * chunk && found < kept; ++bit)
        if (bitmap[bit >> 3] >> (bit & 7) & 1) columns[r * kept + found++] = bit - r * chunk;
    }
    for (; found < kept; ++found) columns[r * kept + found] = 0;
  }
}

// The sum of the 32-bit words, each times an odd number that depends on where it is; the last is filled up with zeros.
int64_t detonation_checksum(const uint8_t *bytes, int64_t count, int64_t first) {
  uint64_t sum = 0, at = (uint64_t(first) + 1) * 0x9E3779B97F4A7C15u;
  for (int64_t i = 0; i < count / 4; ++i, at += 0x9E3779B97F4A7C15u) {
    uint32_t word;
    std::memcpy(&word, bytes + 4 * i, 4);
    sum += uint64_t(word) * ((at ^ at >> 32) | 1);
  }
  if (count % 4) {
    uint32_t word = 0;
    std::memcpy(&word, bytes + count / 4 * 4, size_t(count % 4));
    sum += uint64_t(word) * ((at ^ at >> 32) | 1);
  }
  return int64_t(sum);
}

// 1 where a column of `width` bits is not below `chunk`, 2 where those of a row do not rise, 0 where all is well.
int detonation_check_columns(const uint8_t *packed, int64_t rows, int kept, int chunk, int width) {
  Unpacker columns(packed, (rows * kept * width + 7) / 8);
  if (width <= 8) return check_bytes(columns, rows, kept, chunk, width);
  int fault = 0;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0, before = -1; k < kept; ++k) {
      const int64_t column = columns.get(width);
      if (column >= chunk) return 1;
      if (column <= before) fault = 2;
      before = column;
    }
  return fault;
}

// 2 where a row of the bitmap has not exactly `kept` bits set, 0 where all is well.
int detonation_check_bitmap(const uint8_t *bitmap, int64_t rows, int kept, int chunk) {
  for (int64_t r = 0; r < rows; ++r) {
    int found = 0;
    if (chunk % 64 == 0) {
      for (int word = 0; word < chunk / 64; ++word) {
        uint64_t marks;
        std::memcpy(&marks, bitmap + r * chunk / 8 + 8 * word, sizeof marks);
        found += __builtin_popcountll(marks);
      }
    } else if (chunk % 8 == 0) {
      for (int byte = 0; byte < chunk / 8; ++byte) found += __builtin_popcount(bitmap[r * chunk / 8 + byte]);
    } else {
      for (int64_t bit = r * chunk; bit < (r + 1) * chunk; ++bit) found += bitmap[bit >> 3] >> (bit & 7) & 1;
    }
    if (found != kept) return 2;
  }
  return 0;
}

}
