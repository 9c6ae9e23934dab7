// A few coefficients of a row back from the DCT: a sum of basis vectors.

#pragma once

#include <cmath>

#include "lanes.h"

namespace {

// Asks memory for the next rows, a few lines at a time between other work: a burst of them has to wait in line, and rows
// that are used once do not come fast enough by themselves.
class Ahead {
 public:
  Ahead(const float *changed, const float *read) : changed_(changed), read_(read) {}

  INLINE void lines(int count) {
    for (const int end = at_ + count * LINE; at_ < end; at_ += LINE)
      __builtin_prefetch(changed_ + at_, 1), __builtin_prefetch(read_ + at_, 0);
  }

 private:
  static constexpr int LINE = 16;
  const float *changed_, *read_;
  int at_ = 0;
};

constexpr int FEW = 12;  // coefficients a row, of all messages together

template <int N> struct Waves {
  alignas(64) float of[N][N];  // of[c]: the orthonormal basis vector of column c
  Waves() {
    for (int c = 0; c < N; ++c)
      for (int i = 0; i < N; ++i) of[c][i] = float(std::cos(M_PI / N * (i + 0.5) * c) * std::sqrt((c ? 2.0 : 1.0) / N));
  }
  static const Waves &table() {
    static const Waves waves;
    return waves;
  }
};

// A few coefficients of each row, of one message or several.
struct Few {
  const float *const *values;
  const uint8_t *columns;  // LANES * k a message
  int messages, k;
};

// rows = (FRESH ? 0 : rows) + weight * the coefficients, back from the DCT; `between` runs at each row.
template <int N, bool FRESH, typename Between>
INLINE void add_waves(float *rows, int here, float weight, const Few &few, const Between &between) {
  const Waves<N> &waves = Waves<N>::table();
  constexpr int V = N / LANES;
  for (int row = 0; row < here; ++row, rows += N) {
    Floats sum[V];
#pragma GCC unroll 16
    for (int b = 0; b < V; ++b) sum[b] = FRESH ? Floats{} : load(rows + b * LANES);
    between();
    for (int m = 0; m < few.messages; ++m) {
      const float *value = few.values[m] + row * few.k;
      const uint8_t *column = few.columns + (m * LANES + row) * few.k;
      for (int j = 0; j < few.k; ++j) {
        const float share = weight * value[j];
        const float *wave = waves.of[column[j]];
#pragma GCC unroll 16
        for (int b = 0; b < V; ++b) sum[b] += share * load(wave + b * LANES);
      }
    }
#pragma GCC unroll 16
    for (int b = 0; b < V; ++b) store(rows + b * LANES, sum[b]);
  }
}

}  // namespace
