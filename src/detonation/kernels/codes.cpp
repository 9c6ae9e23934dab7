// Encodes values as codes of up to 4 bits, with numbers for each block of values
// (`codebooks.BlockCodebook`). Without sums, so the bits are those of torch on every machine.

#include <cstdint>
#include <cstring>

#include "indices.h"
#include "lanes.h"

namespace {

constexpr int POWERS = 256;  // values of a block of `codebooks.E3M0`
constexpr int LIMITS = 6;
constexpr int PIECE = 256;  // codes that are unpacked together; a multiple of 8, so that each piece begins at a whole byte

INLINE Floats magnitude(Floats v) { return masked(Ints{} + 0x7fffffff, v); }

// Writes a code per value of one block; returns the block's largest magnitude in bf16.
uint16_t encode_block(const float *values, const Floats *limits, uint8_t *codes) {
  Floats most = {};
  for (int i = 0; i < POWERS; i += LANES) {
    const Floats size = magnitude(load(values + i));
    most = size > most ? size : most;
  }
  float largest = 0;
  for (int lane = 0; lane < LANES; ++lane) largest = most[lane] > largest ? most[lane] : largest;
  uint32_t number;
  std::memcpy(&number, &largest, sizeof number);
  number = (number + 0x7fff + (number >> 16 & 1)) & 0xffff0000u;
  std::memcpy(&largest, &number, sizeof largest);
  const Floats whole = Floats{} + largest, tiny = Floats{} + largest / 128;
  for (int i = 0; i < POWERS; i += LANES) {
    const Floats v = load(values + i), size = magnitude(v), ratio = whole / size;
    Ints code = {};
    for (int octave = 0; octave < LIMITS; ++octave) code -= ratio > limits[octave];
    const Ints is_tiny = size <= tiny;
    code = (is_tiny & 7) | (~is_tiny & code) | ((v < 0) & 8);
    for (int lane = 0; lane < LANES; ++lane) codes[i + lane] = uint8_t(code[lane]);
  }
  return uint16_t(number >> 16);
}

INLINE void look_up(const float *levels, int width, const uint8_t *codes, int count, float *values) {
  int i = 0;
#ifdef __AVX512F__
  alignas(64) float table[LANES];
  for (int code = 0; code < LANES; ++code) table[code] = levels[code & ((1 << width) - 1)];
  for (; i + LANES <= count; i += LANES) {
    const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i *>(codes + i));
    _mm512_storeu_ps(values + i, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(some), _mm512_load_ps(table)));
  }
#endif
  for (; i < count; ++i) values[i] = levels[codes[i]];
}

}  // namespace

extern "C" {

// Encodes `lines` lines of `count` values each as codes of `codebooks.E3M0`: packed codes, then a
// bf16 number per block. A line of the result has `nbytes` bytes. `limits`: the largest ratio of
// each number of octaves except the last.
void detonation_encode_powers(const float *values, int64_t lines, int64_t count, const float *limits, uint8_t *encoded,
                              int64_t nbytes) {
  Floats all_limits[LIMITS];
  for (int octave = 0; octave < LIMITS; ++octave) all_limits[octave] = Floats{} + limits[octave];
  for (int64_t line = 0; line < lines; ++line, values += count, encoded += nbytes) {
    uint8_t *statistics = encoded + (count + 1) / 2;
    Packer packer(encoded, (count + 1) / 2);
    for (int64_t start = 0; start < count; start += POWERS, statistics += 2) {
      const int some = count - start < POWERS ? int(count - start) : POWERS;
      float padded[POWERS] = {};
      uint8_t codes[POWERS];
      if (some < POWERS) std::memcpy(padded, values + start, size_t(some) * sizeof(float));
      const uint16_t largest = encode_block(some < POWERS ? padded : values + start, all_limits, codes);
      std::memcpy(statistics, &largest, sizeof largest);
      packer.put_bytes(codes, some, 4);
    }
  }
}

// Decodes `lines` lines of `count` codes each, of up to 4 bits: block b has the levels from
// b << width on. Packed lines are `stride` bytes apart; the levels of two lines are `apart` numbers
// apart.
void detonation_look_up(const uint8_t *packed, int64_t lines, int64_t stride, int64_t nbytes, int64_t count, int width,
                        int64_t block, const float *levels, int64_t apart, float *values) {
  for (int64_t line = 0; line < lines; ++line, packed += stride, levels += apart, values += count) {
    Unpacker unpacker(packed, nbytes);
    for (int64_t start = 0; start < count; start += PIECE) {
      const int some = count - start < PIECE ? int(count - start) : PIECE;
      uint8_t codes[PIECE];
      unpacker.get_bytes(codes, some, width);
      look_up(levels + (start / block << width), width, codes, some, values + start);
    }
  }
}

}
