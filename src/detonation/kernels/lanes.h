// SIMD over rows: lane i of every vector belongs to row i. The types are GCC's vector extensions,
// so the compiler chooses the instructions. LANES is the width of the machine's vectors, because
// the compiler would split wider vectors.

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

INLINE Floats load(const float *from) {
  Floats v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

INLINE void store(float *to, Floats v) { std::memcpy(to, &v, sizeof v); }

INLINE Ints bits(Floats v) {
  Ints b;
  std::memcpy(&b, &v, sizeof b);
  return b;
}

// v where the mask is -1, zero where it is 0.
INLINE Floats masked(Ints mask, Floats v) {
  const Ints b = bits(v) & mask;
  std::memcpy(&v, &b, sizeof v);
  return v;
}

// a * b + c, rounded once.
INLINE float fused(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
  return __builtin_fmaf(a, b, c);
#else
  // both the product and the error of the sum are exact
  const double product = double(a) * b, sum = product + c, part = sum - product;
  const double error = (product - (sum - part)) + (c - part);
  int64_t number;
  std::memcpy(&number, &sum, sizeof number);
  // an inexact sum becomes its odd neighbour, which no rounding to fp32 takes for a tie
  if ((error > 0 || error < 0) && !(number & 1)) number += (error > 0) == (sum > 0) ? 1 : -1;
  double odd;
  std::memcpy(&odd, &number, sizeof odd);
  return float(odd);
#endif
}

INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return Floats(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#elif defined(__AVX2__) && defined(__FMA__)
  return Floats(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#else
  for (int lane = 0; lane < LANES; ++lane) c[lane] = fused(a[lane], b[lane], c[lane]);
  return c;
#endif
}

// Selects the element x[index] of each lane.
INLINE Floats pick(const Floats *x, Ints index) {
#ifdef __AVX512F__
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return Floats(_mm512_i32gather_ps(_mm512_add_epi32(__m512i(index * LANES), lane), x, 4));
#else
  Floats picked;
  for (int lane = 0; lane < LANES; ++lane) picked[lane] = x[index[lane]][lane];
  return picked;
#endif
}

template <int S> INLINE void swap(Floats &a, Floats &b) {
  Ints low, high;
  for (int j = 0; j < LANES; ++j) {
    low[j] = (j & S) ? LANES + j - S : j;
    high[j] = (j & S) ? LANES + j : j + S;
  }
  const Floats first = __builtin_shuffle(a, b, low), second = __builtin_shuffle(a, b, high);
  a = first;
  b = second;
}

// Transposes a square of LANES vectors.
template <int S = LANES / 2> INLINE void transpose(Floats *v) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i)
    if (!(i & S)) swap<S>(v[i], v[i + S]);
  if constexpr (S > 1) transpose<S / 2>(v);
}

// Transposes four vectors so that the four numbers of a lane are adjacent: lane 4 * b + i is in block b of v[i].
INLINE void transpose_fours(Floats *v) {
  swap<2>(v[0], v[2]), swap<2>(v[1], v[3]);
  swap<1>(v[0], v[1]), swap<1>(v[2], v[3]);
}

// Transposes LANES rows of N, of which the first `valid` exist, to one vector per column.
// `between`, which may prefetch, is called once per square of LANES x LANES numbers.
template <int N, typename Between>
INLINE void to_lanes(const float *rows, int valid, Floats *x, const Between &between) {
  for (int block = 0; block < N; block += LANES) {
    Floats v[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) v[i] = i < valid ? load(rows + i * N + block) : Floats{};
    between();
    transpose(v);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) x[block + i] = v[i];
  }
}

// The inverse of to_lanes.
template <int N> INLINE void to_rows(const Floats *x, int valid, float *rows) {
  for (int block = 0; block < N; block += LANES) {
    Floats v[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) v[i] = x[block + i];
    transpose(v);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i)
      if (i < valid) store(rows + i * N + block, v[i]);
  }
}

}  // namespace
