// Encodes values as codes of up to 4 bits, with statistics of each block of values
// (`codebooks.BlockCodebook`). All operations have a fixed order, so the bits are those of torch on
// every machine.

#include <cstdint>
#include <cstring>

#include "indices.h"
#include "lanes.h"

namespace {

// Levels of `codebooks.E3M0`, relative to the largest magnitude of a block.
constexpr float FALLING[16] = {1,  1 / 2.0f,  1 / 4.0f,  1 / 8.0f,  1 / 16.0f,  1 / 32.0f,  1 / 64.0f,  0,
                               -1, -1 / 2.0f, -1 / 4.0f, -1 / 8.0f, -1 / 16.0f, -1 / 32.0f, -1 / 64.0f, -0.0f};
constexpr int POWERS = 256;  // number of values in a block of `codebooks.E3M0`
constexpr int LIMITS = 6;
typedef uint8_t Codes __attribute__((vector_size(LANES)));
// Number of codes that are decoded together; a multiple of 8, so that each piece begins at a whole
// byte.
constexpr int PIECE = 256;

INLINE Floats magnitude(Floats v) { return masked(Ints{} + 0x7fffffff, v); }

// A table of 16 numbers in registers.
struct Table {
#if defined(__AVX512F__)
  __m512 all;
  explicit Table(const float *from) : all(_mm512_loadu_ps(from)) {}
  INLINE Floats at(Ints number) const { return Floats(_mm512_permutexvar_ps(__m512i(number), all)); }
#elif defined(__AVX2__)
  __m256 low, high;
  explicit Table(const float *from) : low(_mm256_loadu_ps(from)), high(_mm256_loadu_ps(from + 8)) {}
  INLINE Floats at(Ints number) const {
    const __m256i n = __m256i(number);
    // bit 3 of a number selects `high`; it becomes the sign bit, the only bit that `blendv` reads
    const __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(n, 28));
    return Floats(_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, n), _mm256_permutevar8x32_ps(high, n), is_high));
  }
#else
  float all[16];
  explicit Table(const float *from) { std::memcpy(all, from, sizeof all); }
  INLINE Floats at(Ints number) const {
    Floats v;
    for (int lane = 0; lane < LANES; ++lane) v[lane] = all[number[lane]];
    return v;
  }
#endif
};

// Unpacks LANES codes of W bits, the first of which begins at the first bit of `packed`.
template <int W> INLINE Ints unpacked(const uint8_t *packed) {
  typedef int64_t Words __attribute__((vector_size(4 * LANES)));
  typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
  int64_t word = 0;
  std::memcpy(&word, packed, LANES * W / 8);
  Ints half, shift;
  for (int lane = 0; lane < LANES; ++lane) half[lane] = lane * W / 32, shift[lane] = lane * W % 32;
  const Bits halves = Bits(__builtin_shuffle(Ints(Words{} + word), half));
  return Ints(halves >> Bits(shift)) & ((1 << W) - 1);
}

INLINE void narrowed(Ints code, uint8_t *codes) {
  const Codes some = __builtin_convertvector(code, Codes);
  std::memcpy(codes, &some, sizeof some);
}

// Writes a code per value of one block; returns the block's largest magnitude in bf16. With
// `subtract`, subtracts from each value the level that receivers decode.
template <bool subtract> uint16_t encode_block(float *values, const Table &limits, uint8_t *codes) {
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
  float levels[16];
  for (int code = 0; code < 16; ++code) levels[code] = largest * FALLING[code];
  const Table table(levels);
  const Floats whole = Floats{} + largest, tiny = Floats{} + largest / 128;
  for (int i = 0; i < POWERS; i += LANES) {
    const Floats v = load(values + i), size = magnitude(v), ratio = whole / size;
    Ints code = (bits(ratio) >> 23) - 127;  // rounded down
    code = code > 0 ? code : Ints{};
    code = code < LIMITS ? code : Ints{} + LIMITS;
    code -= ratio > limits.at(code);
    const Ints is_tiny = size <= tiny;
    code = (is_tiny & 7) | (~is_tiny & code) | ((v < 0) & 8);
    narrowed(code, codes + i);
    if (subtract) store(values + i, v - table.at(code));
  }
  return uint16_t(number >> 16);
}

// Encodes one line of values; see `detonation_encode_powers`.
template <bool subtract>
void encode_powers(float *values, int64_t count, const Table &limits, uint8_t *packed, uint8_t *statistics) {
  Packer packer(packed, (count + 1) / 2);
  for (int64_t start = 0; start < count; start += POWERS, statistics += 2) {
    const int some = count - start < POWERS ? int(count - start) : POWERS;
    float padded[POWERS] = {}, *block = values + start;
    uint8_t codes[POWERS];
    if (some < POWERS) block = padded, std::memcpy(padded, values + start, size_t(some) * sizeof(float));
    const uint16_t largest = encode_block<subtract>(block, limits, codes);
    if (subtract && some < POWERS) std::memcpy(values + start, padded, size_t(some) * sizeof(float));
    std::memcpy(statistics, &largest, sizeof largest);
    packer.put_bytes(codes, some, 4);
  }
}

// Decodes `count` codes, the first of which begins at the first bit of `packed`: writes the level
// of each code into `values`, or with `add` adds it.
template <int W, bool add>
INLINE void look_up(const float *levels, const uint8_t *packed, int64_t nbytes, int count, float *values) {
  float all[16];
  for (int code = 0; code < 16; ++code) all[code] = levels[code & ((1 << W) - 1)];
  const Table table(all);
  int i = 0;
  if (LANES * W % 8 == 0 && 32 % W == 0)  // not for 3 bits: some of these codes are in two words
    for (; i + LANES <= count; i += LANES) {
      const Floats level = table.at(unpacked<W>(packed + i * W / 8));
      store(values + i, add ? load(values + i) + level : level);
    }
  Unpacker rest(packed + i * W / 8, nbytes - i * W / 8);
  for (; i < count; ++i) {
    const float level = all[rest.get(W)];
    values[i] = add ? values[i] + level : level;
  }
}

// Decodes all lines, piece by piece; see `detonation_look_up`.
template <int W>
void decode_codes(const uint8_t *packed, int64_t lines, int64_t stride, int64_t nbytes, int64_t count, int64_t block,
                  const float *levels, int64_t apart, bool mean, float *values) {
  for (int64_t start = 0; start < count; start += PIECE) {
    const int some = count - start < PIECE ? int(count - start) : PIECE;
    const int64_t byte = start * W / 8;
    for (int64_t line = 0; line < lines; ++line) {
      const float *table = levels + line * apart + (start / block << W);
      const uint8_t *codes = packed + line * stride + byte;
      if (mean && line)
        look_up<W, true>(table, codes, nbytes - byte, some, values + start);
      else
        look_up<W, false>(table, codes, nbytes - byte, some, values + line * count + start);
    }
    if (mean && lines > 1)
      for (int i = 0; i < some; ++i) values[start + i] /= float(lines);
  }
}

}  // namespace

extern "C" {

// Encodes `lines` lines of `count` values each as codes of `codebooks.E3M0`: `packed` codes, and
// `statistics`, the largest magnitude of each block in bf16. Lines of both are `nbytes` bytes
// apart. `limits[n]`: the largest ratio of this magnitude to a value with code n; a value with a
// larger ratio gets code n + 1. With `subtract`, values become their rounding errors.
void detonation_encode_powers(float *values, int64_t lines, int64_t count, const float *limits, uint8_t *packed,
                              uint8_t *statistics, int64_t nbytes, int subtract) {
  float of_octave[16];
  for (int octave = 0; octave < 16; ++octave) of_octave[octave] = octave < LIMITS ? limits[octave] : __builtin_inff();
  const Table table(of_octave);
  const auto encode = subtract ? encode_powers<true> : encode_powers<false>;
  for (int64_t line = 0; line < lines; ++line)
    encode(values + line * count, count, table, packed + line * nbytes, statistics + line * nbytes);
}

// Decodes `lines` lines of `count` codes each, of up to 4 bits: block b has the levels from
// b << width on. Packed lines are `stride` bytes apart; the levels of two lines are `apart` numbers
// apart. With `mean`, writes one line: the mean of all lines, which are added in their order.
void detonation_look_up(const uint8_t *packed, int64_t lines, int64_t stride, int64_t nbytes, int64_t count, int width,
                        int64_t block, const float *levels, int64_t apart, int mean, float *values) {
  constexpr decltype(&decode_codes<1>) OF_WIDTH[] = {decode_codes<1>, decode_codes<2>, decode_codes<3>, decode_codes<4>};
  OF_WIDTH[width - 1](packed, lines, stride, nbytes, count, block, levels, apart, mean, values);
}

}
