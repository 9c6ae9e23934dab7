// The inverse DCT as a sum of basis vectors, one fused multiply-add after the other. The bits are the
// same in all engines.

#pragma once

#include "lanes.h"

namespace {

// Prefetches the next rows, a few cache lines at a time between other work: a burst of requests would queue, and the
// hardware prefetcher is too slow for rows that are used once.
class Prefetcher {
 public:
  Prefetcher(const float *changed, const float *read) : changed_(changed), read_(read) {}

  INLINE void lines(int count) {
    for (const int end = at_ + count * LINE; at_ < end; at_ += LINE)
      __builtin_prefetch(changed_ + at_, 1), __builtin_prefetch(read_ + at_, 0);
  }

 private:
  static constexpr int LINE = 16;
  const float *changed_, *read_;
  int at_ = 0;
};

// The few coefficients of each of LANES rows, from one or several messages.
struct FewCoefficients {
  const float *const *values;
  const uint8_t *indices;  // LANES * k per message
  int messages, k;
};

// rows = (FRESH ? 0 : rows) + the sum of weight * value * basis[index], in the order of the
// messages and of their coefficients. `between`, which may prefetch, is called once per row.
template <int N, bool FRESH, typename Between>
INLINE void add_basis_vectors(float *rows, int valid, float weight, const float *basis, const FewCoefficients &few,
                              const Between &between) {
  // number of SIMD vectors of a row that stay in registers
  constexpr int V = N / LANES < 8 ? N / LANES : 8;
  for (int row = 0; row < valid; ++row, rows += N) {
    between();
    for (int at = 0; at < N; at += V * LANES) {
      Floats sum[V];
#pragma GCC unroll 8
      for (int b = 0; b < V; ++b) sum[b] = FRESH ? Floats{} : load(rows + at + b * LANES);
      for (int m = 0; m < few.messages; ++m) {
        const float *value = few.values[m] + row * few.k;
        const uint8_t *index = few.indices + (m * LANES + row) * few.k;
        for (int j = 0; j < few.k; ++j) {
          const Floats scaled = Floats{} + weight * value[j];
          const float *vector = basis + index[j] * N + at;
#pragma GCC unroll 8
          for (int b = 0; b < V; ++b) sum[b] = fused(scaled, load(vector + b * LANES), sum[b]);
        }
      }
#pragma GCC unroll 8
      for (int b = 0; b < V; ++b) store(rows + at + b * LANES, sum[b]);
    }
  }
}

// Computes ROWS rows of `multiply_by_basis`.
template <int N, int ROWS> INLINE void multiply_some(const float *coefficients, const float *basis, float *rows) {
  constexpr int V = N / LANES < 2 ? N / LANES : 2;
  for (int at = 0; at < N; at += V * LANES) {
    Floats sum[ROWS][V] = {};
    for (int c = 0; c < N; ++c) {
      const float *vector = basis + c * N + at;
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int b = 0; b < V; ++b)
          sum[r][b] = fused(coefficients[r * N + c] - Floats{}, load(vector + b * LANES), sum[r][b]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
      for (int b = 0; b < V; ++b) store(rows + r * N + at + b * LANES, sum[r][b]);
  }
}

// rows = coefficients * basis; basis vectors are added in order, from zero on.
template <int N> void multiply_by_basis(const float *coefficients, int64_t valid, const float *basis, float *rows) {
  constexpr int ROWS = LANES / 2;
  int64_t row = 0;
  for (; row + ROWS <= valid; row += ROWS) multiply_some<N, ROWS>(coefficients + row * N, basis, rows + row * N);
  for (; row < valid; ++row) multiply_some<N, 1>(coefficients + row * N, basis, rows + row * N);
}

}  // namespace
