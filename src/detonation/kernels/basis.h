// Inverse DCT of a few coefficients per row, as a sum of basis vectors.

#pragma once

#include <cmath>

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

constexpr int FEW = 12;  // coefficients per row, over all messages

template <int N> struct Basis {
  alignas(64) float of[N][N];  // of[c]: the orthonormal basis vector of index c
  Basis() {
    for (int c = 0; c < N; ++c)
      for (int i = 0; i < N; ++i) of[c][i] = float(std::cos(M_PI / N * (i + 0.5) * c) * std::sqrt((c ? 2.0 : 1.0) / N));
  }
  static const Basis &table() {
    static const Basis basis;
    return basis;
  }
};

// A few coefficients of each row, of one or several messages.
struct FewCoefficients {
  const float *const *values;
  const uint8_t *indices;  // LANES * k per message
  int messages, k;
};

// rows = (FRESH ? 0 : rows) + weight * inverse DCT of the coefficients; `between` is called once per row.
template <int N, bool FRESH, typename Between>
INLINE void add_basis_vectors(float *rows, int valid, float weight, const FewCoefficients &few,
                              const Between &between) {
  const Basis<N> &basis = Basis<N>::table();
  constexpr int V = N / LANES;
  for (int row = 0; row < valid; ++row, rows += N) {
    Floats sum[V];
#pragma GCC unroll 16
    for (int b = 0; b < V; ++b) sum[b] = FRESH ? Floats{} : load(rows + b * LANES);
    between();
    for (int m = 0; m < few.messages; ++m) {
      const float *value = few.values[m] + row * few.k;
      const uint8_t *index = few.indices + (m * LANES + row) * few.k;
      for (int j = 0; j < few.k; ++j) {
        const float scaled = weight * value[j];
        const float *vector = basis.of[index[j]];
#pragma GCC unroll 16
        for (int b = 0; b < V; ++b) sum[b] += scaled * load(vector + b * LANES);
      }
    }
#pragma GCC unroll 16
    for (int b = 0; b < V; ++b) store(rows + b * LANES, sum[b]);
  }
}

}  // namespace
