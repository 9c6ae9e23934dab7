// From messages to an update, LANES rows at a time: a sum of basis vectors where a row has few coefficients, and the
// transposed DCT of several rows at once where it has many.

#pragma once

#include "columns.h"
#include "dct.h"
#include "rows.h"
#include "waves.h"

namespace {

// What messages say of LANES rows.
template <int N> struct Decoder {
  const float *const *values;
  Unpacker *columns;
  const int messages, k, width;
  const bool senders;
  const float weight;
  alignas(64) Floats sum[N], count[N], scratch[N];
  alignas(64) uint8_t column[LANES * (N > FEW ? N : FEW)];

  Decoder(const float *const *values, Unpacker *columns, int messages, int k, int width, bool senders, float weight)
      : values(values), columns(columns), messages(messages), k(k), width(width), senders(senders), weight(weight) {}

  // rows = weight * the sum of what they say of rows `start` and on, or their mean over senders.
  void run(int64_t start, int here, float *rows) {
    if (!senders && messages * k <= FEW) {
      const float *value[FEW];
      for (int m = 0; m < messages; ++m) {
        list_columns(columns[m], here, column + m * LANES * k);
        value[m] = values[m] + start * k;
      }
      return add_waves<N, true>(rows, here, weight, Few{value, column, messages, k}, [] {});
    }
    if (senders)
      collect_by_senders(start, here);
    else
      collect(start, here, rows);
    for (int c = 0; c < N; ++c) sum[c] *= weight * norm<N>(c);
    Dct<N>::transposed(sum, scratch);
    to_rows<N>(sum, here, rows);
  }

  void list_columns(Unpacker &unpacker, int here, uint8_t *column) {
    if (width) return unpacker.get_bytes(column, here * k, width);
    for (int row = 0; row < here; ++row) list<N>(Marks<N>(unpacker), k, column + row * k);
  }

  void collect(int64_t start, int here, float *rows) {
    std::memset(rows, 0, size_t(here) * N * sizeof(float));
    for (int m = 0; m < messages; ++m) {
      const float *value = values[m] + start * k;
#ifdef __AVX512F__
      if (!width) {
        add_marked(columns[m], value, rows, here);
        continue;
      }
#endif
      list_columns(columns[m], here, column);
      for (int row = 0, i = 0; row < here; ++row)
        for (int j = 0; j < k; ++j, ++i) rows[row * N + column[i]] += value[i];
    }
    to_lanes<N>(rows, here, sum, [] {});
  }

#ifdef __AVX512F__
  void add_marked(Unpacker &unpacker, const float *value, float *rows, int here) {
    for (int row = 0; row < here; ++row, rows += N) {
      const Marks<N> marks(unpacker);
      for (int j = 0; j < k; j += LANES) __builtin_prefetch(value + LANES * k + j, 0);
      int left = k;  // whatever the bitmap says
      for (int b = 0; b < N; b += LANES) {
        const __mmask16 mask = marks.at(b);
        const int told = __builtin_popcount(mask);
        if (told > left) break;
        store(rows + b, load(rows + b) + Floats(_mm512_maskz_expandloadu_ps(mask, value)));
        value += told;
        left -= told;
      }
      value += left;
    }
  }
#endif

  void collect_by_senders(int64_t start, int here) {
    std::memset(sum, 0, sizeof sum);
    std::memset(count, 0, sizeof count);
    float *total = reinterpret_cast<float *>(sum), *told = reinterpret_cast<float *>(count);
    for (int m = 0; m < messages; ++m) {
      list_columns(columns[m], here, column);
      const float *value = values[m] + start * k;
      for (int row = 0, i = 0; row < here; ++row)
        for (int j = 0; j < k; ++j, ++i) {
          total[column[i] * LANES + row] += value[i];
          told[column[i] * LANES + row] += value[i] != 0;
        }
    }
    for (int c = 0; c < N; ++c) sum[c] /= count[c] > 1 ? count[c] : Floats{} + 1;
  }
};

// Into one tensor a parameter.
template <int N> void decode(Decoder<N> &block, const Slots &slots, int64_t rows) {
  Rows<N> walk(slots);
  alignas(64) float staged[LANES * N];
  for (int64_t start = 0; start < rows; start += LANES) {
    const int here = rows - start < LANES ? int(rows - start) : LANES;
    float *target = walk.next(here);
    block.run(start, here, target ? target : staged);
    if (!target) walk.scatter(staged);
  }
}

// weights = shrink * weights - lr * sign(directions), rounded twice as torch rounds it. `count` is padded to LANES.
__attribute__((noinline, optimize("fp-contract=off"))) void move(float *weights, const float *directions, int count,
                                                                 float shrink, float lr) {
  const Ints sign = bits(-Floats{}), distance = bits(Floats{} + lr);
  for (int i = 0; i < count; i += LANES) {
    const Floats w = shrink * load(weights + i), d = load(directions + i);
    const Ints step = ((bits(d) & sign) | distance) & ((d > 0) | (d < 0));
    Floats s;
    std::memcpy(&s, &step, sizeof s);
    store(weights + i, w - s);
  }
}

// Weights follow the signs of the update, with a shrink and a lr for each parameter; the update itself goes nowhere.
template <int N>
void follow(Decoder<N> &block, const Slots &weights, int64_t rows, const float *shrink, const float *lr) {
  Rows<N> walk(weights);
  alignas(64) float update[LANES * N], staged[LANES * N];
  for (int64_t start = 0; start < rows; start += LANES) {
    const int here = rows - start < LANES ? int(rows - start) : LANES;
    float *weight = walk.next(here);
    block.run(start, here, update);
    if (weight) {
      move(weight, update, here * N, shrink[walk.slot()], lr[walk.slot()]);
      continue;
    }
    walk.gather(staged);
    for (int row = 0; row < here; ++row)
      move(staged + row * N, update + row * N, N, shrink[walk.slot(row)], lr[walk.slot(row)]);
    walk.scatter(staged);
  }
}

template <int N>
void release(float *residual, int64_t rows, const Slots &slots, float share, const float *values, Unpacker *columns,
             int k, int width) {
  Decoder<N> block(&values, columns, 1, k, width, false, share);
  Rows<N> walk(slots);
  alignas(64) float out[LANES * N];
  for (int64_t start = 0; start < rows; start += LANES) {
    const int here = rows - start < LANES ? int(rows - start) : LANES;
    float *r = residual + start * N;
    block.run(start, here, out);
    for (int i = 0; i < here * N; i += LANES) store(r + i, load(r + i) - load(out + i));
    if (!walk.next(here)) walk.clear_padding(r);
  }
}

}  // namespace
