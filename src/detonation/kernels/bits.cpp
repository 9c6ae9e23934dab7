// Packed whole numbers, index bitmaps and checksums, in integer arithmetic: the result is the same
// on every machine.

#include <cstdint>
#include <cstring>

#include "indices.h"

namespace {

// Checks indices of up to 8 bits: 1 if an index is not below `chunk`, 2 if the indices of a row do
// not rise, else 0. Unpacks a group of rows to bytes, so that the compiler can vectorise the
// comparison.
int check_bytes(Unpacker indices, int64_t rows, int k, int chunk, int width) {
  constexpr int ROOM = 4096;
  uint8_t index[ROOM + 1] = {}, inside[ROOM];
  // number of rows of a group; a multiple of 8, so that each group begins at a whole byte
  const int group = ROOM / k & ~7;
  for (int i = 0; i < group * k; ++i) inside[i] = i % k != k - 1;
  uint8_t most = 0, fall = 0;
  for (int64_t r = 0; r < rows; r += group) {
    const int count = int(rows - r < group ? rows - r : group) * k;
    indices.get_bytes(index, count, width);
    for (int i = 0; i < count; ++i) {
      most = index[i] > most ? index[i] : most;
      fall |= uint8_t(index[i] >= index[i + 1]) & inside[i];
    }
  }
  return most >= chunk ? 1 : fall ? 2 : 0;
}

template <typename Index>
void list_marked(const uint8_t *bitmap, int64_t rows, int k, int chunk, Index *indices) {
  for (int64_t r = 0; r < rows; ++r, indices += k) {
    int found = 0;
    if (chunk % 64 == 0) {
      for (int word = 0; word < chunk / 64; ++word) {
        uint64_t left;
        std::memcpy(&left, bitmap + r * chunk / 8 + 8 * word, sizeof left);
        for (; left && found < k; left &= left - 1) indices[found++] = Index(64 * word + __builtin_ctzll(left));
      }
    } else if (chunk % 8 == 0) {
      const uint8_t *row = bitmap + r * chunk / 8;
      for (int byte = 0; byte < chunk / 8; ++byte)
        for (unsigned left = row[byte]; left && found < k; left &= left - 1)
          indices[found++] = Index(8 * byte + __builtin_ctz(left));
    } else {
      for (int64_t bit = r * chunk; bit < (r + 1) * chunk && found < k; ++bit)
        if (bitmap[bit >> 3] >> (bit & 7) & 1) indices[found++] = Index(bit - r * chunk);
    }
    for (; found < k; ++found) indices[found] = 0;
  }
}

// Checks the packed indices of a message: returns 1 if an index of `width` bits is not below
// `chunk`, 2 if the indices of a row do not rise, else 0.
int faults_of_indices(const uint8_t *packed, int64_t rows, int k, int chunk, int width) {
  Unpacker indices(packed, (rows * k * width + 7) / 8);
  if (width <= 8) return check_bytes(indices, rows, k, chunk, width);
  int fault = 0;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0, before = -1; j < k; ++j) {
      const int64_t index = indices.get(width);
      if (index >= chunk) return 1;
      if (index <= before) fault = 2;
      before = index;
    }
  return fault;
}

// Checks the bitmap of a message: returns 2 if a row has not k set bits, else 0.
int faults_of_bitmap(const uint8_t *bitmap, int64_t rows, int k, int chunk) {
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
    if (found != k) return 2;
  }
  return 0;
}

// The checksum of one message of `count` bytes, as `detonation_checksums` defines it.
int64_t checksum(const uint8_t *bytes, int64_t count, int64_t skipped) {
  constexpr int LINE = 1024;
  const auto mixed = [](uint64_t place) {
    const uint64_t at = (place + 1) * 0x9E3779B97F4A7C15u;
    return at ^ at >> 32;
  };
  uint32_t columns[LINE] = {}, words[LINE];
  uint64_t sum = 0;
  for (int64_t line = 0; line * LINE * 4 < count; ++line) {
    const int64_t left = count - line * LINE * 4, size = left < LINE * 4 ? left : LINE * 4;
    if (size < LINE * 4) std::memset(words, 0, sizeof words);
    std::memcpy(words, bytes + line * LINE * 4, size_t(size));
    if (!line && skipped >= 0) std::memset(reinterpret_cast<uint8_t *>(words) + skipped, 0, 8);
    uint32_t total = 0;
    for (int i = 0; i < LINE; ++i) {
      columns[i] += words[i];
      total += words[i];
    }
    sum += uint64_t(int64_t(int32_t(total))) * (mixed(uint64_t(LINE + line)) & ~uint64_t(1));
  }
  for (int i = 0; i < LINE; ++i) sum += uint64_t(int64_t(int32_t(columns[i]))) * (mixed(uint64_t(i)) | 1);
  return int64_t(sum);
}

}  // namespace

extern "C" {

// Packs `lines` lines of `count` numbers each, each line separately. A number has one byte if
// `bytes` is true, else eight.
void detonation_pack(const void *numbers, int64_t lines, int64_t count, int bytes, int width, uint8_t *packed,
                     int64_t nbytes) {
  for (int64_t line = 0; line < lines; ++line) {
    Packer packer(packed + line * nbytes, nbytes);
    if (bytes)
      packer.put_bytes(static_cast<const uint8_t *>(numbers) + line * count, count, width);
    else
      for (int64_t i = 0; i < count; ++i)
        packer.put(uint32_t(static_cast<const int64_t *>(numbers)[line * count + i]), width);
  }
}

// Unpacks the numbers that `detonation_pack` has packed. Packed lines are `stride` bytes apart.
void detonation_unpack(const uint8_t *packed, int64_t lines, int64_t stride, int64_t nbytes, int64_t count, int bytes,
                       int width, void *numbers) {
  for (int64_t line = 0; line < lines; ++line) {
    Unpacker unpacker(packed + line * stride, nbytes);
    if (bytes)
      unpacker.get_bytes(static_cast<uint8_t *>(numbers) + line * count, count, width);
    else
      for (int64_t i = 0; i < count; ++i)
        static_cast<int64_t *>(numbers)[line * count + i] = int64_t(unpacker.get(width));
  }
}

// Writes the bitmap of each of `lines` messages. An index has one byte if `bytes` is true, else eight.
void detonation_mark(const void *indices, int64_t lines, int64_t rows, int k, int chunk, int bytes, uint8_t *bitmaps) {
  const int64_t nbytes = (rows * chunk + 7) / 8;
  if (lines * nbytes)  // if there are no lines, `bitmaps` may be null
    std::memset(bitmaps, 0, size_t(lines * nbytes));
  for (int64_t i = 0; i < lines * rows * k; ++i) {
    const int64_t row = i / k, message = row / rows;
    const int64_t index = bytes ? static_cast<const uint8_t *>(indices)[i] : static_cast<const int64_t *>(indices)[i];
    const int64_t bit = (row - message * rows) * chunk + index;
    bitmaps[message * nbytes + (bit >> 3)] |= uint8_t(1 << (bit & 7));
  }
}

// Lists k indices per row even for a corrupt bitmap: ignores surplus bits, and adds zeros if bits are
// missing.
void detonation_marked(const uint8_t *bitmaps, int64_t lines, int64_t stride, int64_t rows, int k, int chunk, int bytes,
                       void *indices) {
  for (int64_t line = 0; line < lines; ++line) {
    const int64_t at = line * rows * k;
    if (bytes)
      list_marked(bitmaps + line * stride, rows, k, chunk, static_cast<uint8_t *>(indices) + at);
    else
      list_marked(bitmaps + line * stride, rows, k, chunk, static_cast<int64_t *>(indices) + at);
  }
}

// Checksums of `lines` messages of `count` bytes, `stride` bytes apart. A checksum is the sum of the
// 32-bit words of a message, zero-padded to whole lines of LINE words. Each word is multiplied by the
// sum of its line's weight (even) and its column's weight (odd). Lines and columns are added up
// modulo 2**32 first. If `skipped` is not negative, the eight bytes of the first line from `skipped`
// on count as zeros.
void detonation_checksums(const uint8_t *messages, int64_t lines, int64_t stride, int64_t count, int64_t skipped,
                          int64_t *sums) {
  for (int64_t line = 0; line < lines; ++line) sums[line] = checksum(messages + line * stride, count, skipped);
}

// Checks the indices of each message (`width` bits each, or a bitmap if `width` is 0), and writes
// its fault: 1 if an index is not below `chunk`; 2 if the indices of a row do not rise, or if a row
// of the bitmap has not k set bits; else 0. Messages are `stride` bytes apart.
void detonation_check_indices(const uint8_t *packed, int64_t lines, int64_t stride, int64_t rows, int k, int chunk,
                              int width, int64_t *faults) {
  for (int64_t line = 0; line < lines; ++line)
    faults[line] = width ? faults_of_indices(packed + line * stride, rows, k, chunk, width)
                         : faults_of_bitmap(packed + line * stride, rows, k, chunk);
}

}
