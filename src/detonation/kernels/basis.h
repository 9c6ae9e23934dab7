// Inverse DCT of a few coefficients per row, as a sum of basis vectors.

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

// A few coefficients of each row, of one or several messages.
struct FewCoefficients {
  const float *const *values;
  const uint8_t *indices;  // LANES * k per message
  int messages, k;
};

// rows = (FRESH ? 0 : rows) + the sum of weight * value * basis[index], in the order of the messages and of their
// coefficients, one fused multiply-add after the other: the same bits as in any engine. `between` is called once per row.
template <int N, bool FRESH, typename Between>
INLINE void add_basis_vectors(float *rows, int valid, float weight, const float *basis, const FewCoefficients &few,
                              const Between &between) {
  constexpr int V = N / LANES < 8 ? N / LANES : 8;  // vectors of a row that stay in registers
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

}  // namespace
