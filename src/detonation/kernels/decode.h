// Decodes messages to an update, LANES rows at a time, by one sum of basis vectors for each row. If a
// row has few coefficients, the sum has one vector per coefficient of each message. Otherwise it has
// all vectors, times the aggregated coefficients.

#pragma once

#include "indices.h"
#include "dct.h"
#include "rows.h"
#include "basis.h"
#include "signs.h"

#include <vector>

namespace {

// Decodes LANES rows of the messages of all replicas.
template <int N> struct Decoder {
  const float *const *values;
  Unpacker *indices;
  const int messages, k, width;
  const bool few, nonzero;
  const float weight;
  const float *const basis;
  const float *const *magnitudes;  // the magnitude of each block if the values are signs; else null
  std::vector<float> read;
  alignas(64) float sum[LANES * N], count[LANES * N];
  alignas(64) uint8_t index[LANES * N];

  Decoder(const float *const *values, Unpacker *indices, int messages, int k, int width, bool few, bool nonzero,
          float weight, const float *basis, const float *const *magnitudes = nullptr)
      : values(values), indices(indices), messages(messages), k(k), width(width), few(few), nonzero(nonzero),
        weight(weight), basis(basis), magnitudes(magnitudes),
        read(magnitudes ? size_t(messages) * LANES * k + LANES : 0) {}

  // Returns the values of message m from row `start` on.
  const float *values_of(int m, int64_t start, int valid) {
    if (!magnitudes) return values[m] + start * k;
    float *to = read.data() + m * LANES * k;
    signed_values(reinterpret_cast<const uint8_t *>(values[m]), magnitudes[m], start * k, valid * k, to);
    return to;
  }

  // rows = the mean of the messages for the rows from `start` on, or the mean over nonzero values.
  // With one message, or with `few`, rows = `weight` times the sum.
  void run(int64_t start, int valid, float *rows) {
    if (few) {
      const float *value[N];
      for (int m = 0; m < messages; ++m) {
        list_indices(indices[m], valid, index + m * LANES * k);
        value[m] = values_of(m, start, valid);
      }
      return add_basis_vectors<N, true>(rows, valid, weight, basis, FewCoefficients{value, index, messages, k}, [] {});
    }
    collect(start, valid);
    if (nonzero)
      for (int i = 0; i < valid * N; ++i) sum[i] /= count[i] > 1 ? count[i] : 1;
    else if (messages > 1)
      for (int i = 0; i < valid * N; ++i) sum[i] /= float(messages);
    else if (weight != 1)
      for (int i = 0; i < valid * N; ++i) sum[i] *= weight;
    multiply_by_basis<N>(sum, valid, basis, rows);
  }

  void list_indices(Unpacker &unpacker, int valid, uint8_t *index) {
    if (width) return unpacker.get_bytes(index, valid * k, width);
    for (int row = 0; row < valid; ++row) marked_indices<N>(RowBitmap<N>(unpacker), k, index + row * k);
  }

  void collect(int64_t start, int valid) {
    std::memset(sum, 0, size_t(valid) * N * sizeof(float));
    if (nonzero) std::memset(count, 0, size_t(valid) * N * sizeof(float));
    for (int m = 0; m < messages; ++m) {
      const float *value = values_of(m, start, valid);
#ifdef __AVX512F__
      if (!width && !nonzero) {
        add_marked(indices[m], value, sum, valid);
        continue;
      }
#endif
      list_indices(indices[m], valid, index);
      for (int row = 0, i = 0; row < valid; ++row)
        for (int j = 0; j < k; ++j, ++i) {
          sum[row * N + index[i]] += value[i];
          if (nonzero) count[row * N + index[i]] += value[i] != 0;
        }
    }
  }

#ifdef __AVX512F__
  void add_marked(Unpacker &unpacker, const float *value, float *rows, int valid) {
    for (int row = 0; row < valid; ++row, rows += N) {
      const RowBitmap<N> marks(unpacker);
      for (int j = 0; j < k; j += LANES) __builtin_prefetch(value + LANES * k + j, 0);
      int left = k;  // a corrupt bitmap may mark more than k indices
      for (int b = 0; b < N; b += LANES) {
        const __mmask16 mask = marks.at(b);
        const int marked = __builtin_popcount(mask);
        if (marked > left) break;
        store(rows + b, load(rows + b) + Floats(_mm512_maskz_expandloadu_ps(mask, value)));
        value += marked;
        left -= marked;
      }
      value += left;
    }
  }
#endif
};

// Prefetches the memory after LANES rows, which is written next: the hardware prefetcher stops at
// each page.
template <int N> INLINE void prefetch_next(const float *rows) {
  for (int i = LANES * N; rows && i < 2 * LANES * N; i += 16) __builtin_prefetch(rows + i, 1);
}

// Writes the update into one tensor per parameter.
template <int N> void decode(Decoder<N> &block, const Slots &slots, int64_t rows) {
  Rows<N> walk(slots);
  alignas(64) float staged[LANES * N];
  for (int64_t start = 0; start < rows; start += LANES) {
    const int valid = rows - start < LANES ? int(rows - start) : LANES;
    float *target = walk.next(valid);
    prefetch_next<N>(target);
    block.run(start, valid, target ? target : staged);
    if (!target) walk.scatter(staged);
  }
}

// weights = shrink * weights - lr * sign(directions), rounded twice like torch. `count` is padded to LANES.
__attribute__((noinline)) void sign_step(float *weights, const float *directions, int count, float shrink, float lr) {
  const Ints sign = bits(-Floats{}), distance = bits(Floats{} + lr);
  for (int i = 0; i < count; i += LANES) {
    const Floats w = shrink * load(weights + i), d = load(directions + i);
    const Ints step = ((bits(d) & sign) | distance) & ((d > 0) | (d < 0));
    Floats s;
    std::memcpy(&s, &step, sizeof s);
    store(weights + i, w - s);
  }
}

// Steps along the signs of the update, with a shrink and a lr per parameter; the update itself is not stored.
template <int N>
void apply_signs(Decoder<N> &block, const Slots &weights, int64_t rows, const float *shrink, const float *lr) {
  Rows<N> walk(weights);
  alignas(64) float update[LANES * N], staged[LANES * N];
  for (int64_t start = 0; start < rows; start += LANES) {
    const int valid = rows - start < LANES ? int(rows - start) : LANES;
    float *weight = walk.next(valid);
    prefetch_next<N>(weight);
    block.run(start, valid, update);
    if (weight) {
      sign_step(weight, update, valid * N, shrink[walk.slot()], lr[walk.slot()]);
      continue;
    }
    walk.gather(staged);
    for (int row = 0; row < valid; ++row)
      sign_step(staged + row * N, update + row * N, N, shrink[walk.slot(row)], lr[walk.slot(row)]);
    walk.scatter(staged);
  }
}

template <int N>
void release(float *residual, int64_t rows, const Slots &slots, float alpha, const float *values, Unpacker *indices,
             int k, int width, bool few, const float *basis) {
  Decoder<N> block(&values, indices, 1, k, width, few, false, alpha, basis);
  Rows<N> walk(slots);
  alignas(64) float out[LANES * N];
  for (int64_t start = 0; start < rows; start += LANES) {
    const int valid = rows - start < LANES ? int(rows - start) : LANES;
    float *r = residual + start * N;
    block.run(start, valid, out);
    for (int i = 0; i < valid * N; i += LANES) store(r + i, load(r + i) - load(out + i));
    if (!walk.next(valid)) walk.clear_padding(r);
  }
}

}  // namespace
