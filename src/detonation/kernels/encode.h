// From gradients to a message: memory, DCT, selection and what is taken out of memory, LANES rows at a time.

#pragma once

#include "columns.h"
#include "dct.h"
#include "rows.h"
#include "select.h"
#include "waves.h"

namespace {

template <int N> struct Encoder {
  alignas(64) Floats x[N], told[N], scratch[N];
  alignas(64) float staged[LANES * N];
  alignas(64) float said[LANES * N + LANES];  // the values of each row, one row after the other
  alignas(64) uint8_t columns[LANES * N + 4];
  Marks<N> marks[LANES];

  // rows = decay * rows + gradient; x = the coefficients of LANES rows.
  void take_in(float *rows, const float *gradient, float decay, int here, Ahead &next) {
    for (int i = 0; i < here * N; i += LANES) store(rows + i, decay * load(rows + i) + load(gradient + i));
    to_lanes<N>(rows, here, x, [&] { next.lines(LANES / 4); });
    next.lines(N / 4);
    Dct<N>::template forward<true>(x, scratch);
  }

  // Finds the k largest of each row, k up to FEW: `said` and `columns`, in the order of columns.
  void few(int k) {
    if (k == 1) return few_of<1>(k);
    if (k == 2) return few_of<2>(k);
    if (k <= 4) return few_of<4>(k);
    if (k <= 8) return few_of<8>(k);
    few_of<16>(k);
  }

  template <int P> __attribute__((noinline)) void few_of(int k) {
    constexpr int FILLED = P < 4 ? 4 : P;
    Ints best[P];
    largest<N, P>(x, best);
#pragma GCC unroll 16
    for (int j = 0; j < P; ++j) best[j] = j < k ? best[j] & (N - 1) : Ints{} - 1;
    sort<P>(best);
    Floats value[FILLED] = {};
    Ints four[FILLED / 4] = {};
#pragma GCC unroll 16
    for (int j = 0; j < P; ++j) {
      const Ints column = (N - 1 - best[j]) & (N - 1);
      value[j] = pick(x, column);
      four[j / 4] |= column << 8 * (j % 4);
    }
#pragma GCC unroll 4
    for (int j = 0; j < FILLED; j += 4) beside(value + j);
    for (int lane = 0; lane < LANES; ++lane)  // each writes over what the one before it wrote too much
      for (int j = 0; j < k; j += 4) {
        const float *block = reinterpret_cast<const float *>(value + j + lane % 4) + lane / 4 * 4;
        std::memcpy(said + lane * k + j, block, 4 * sizeof(float));
        std::memcpy(columns + lane * k + j, reinterpret_cast<const int32_t *>(four + j / 4) + lane, 4);
      }
  }

  // The same for any k; told = share of them, scaled for the transposed DCT, zeros elsewhere.
  void many(int k, bool listed, float share) {
    mark(k, share);
    to_rows<N>(x, LANES, staged);
    float *to = said;
    for (int lane = 0; lane < LANES; ++lane, to += k) {
      if (listed) list<N>(marks[lane], k, columns + lane * k);
#ifdef __AVX512F__
      float *next = to;
      for (int b = 0; b < N; b += LANES) {
        const __mmask16 mask = marks[lane].at(b);
        _mm512_storeu_ps(next, _mm512_maskz_compress_ps(mask, __m512(load(staged + lane * N + b))));
        next += __builtin_popcount(mask);
      }
#else
      if (!listed) list<N>(marks[lane], k, columns + lane * k);
      for (int j = 0; j < k; ++j) to[j] = staged[lane * N + columns[lane * k + j]];
#endif
    }
  }

  void mark(int k, float share) {
    const Ints least = kth<N>(x, k);
    for (int w = 0; w < Marks<N>::WORDS; ++w) {
      Ints word = {};
#pragma GCC unroll 32
      for (int i = 0; i < Marks<N>::BITS; ++i) {
        const int c = 32 * w + i;
        const Ints chosen = keyed<N>(x[c], c) >= least;
        word |= chosen & int(1u << i);
        if (share != 0) told[c] = where(chosen, x[c] * (share * norm<N>(c)));
      }
      for (int lane = 0; lane < LANES; ++lane) marks[lane].word[w] = uint32_t(word[lane]);
    }
  }

  void write(int here, int k, int width, Packer &packer) {
    if (width) return packer.put_bytes(columns, here * k, width);
    for (int lane = 0; lane < here; ++lane) {
      if (k <= FEW) marks[lane] = Marks<N>(columns + lane * k, k);
      for (int w = 0; w < Marks<N>::WORDS; ++w) packer.put(marks[lane].word[w], Marks<N>::BITS);
    }
  }

  // rows -= what is told.
  void take_out(float *rows, int here) {
    Dct<N>::transposed(told, scratch);
    to_rows<N>(told, here, staged);
    for (int i = 0; i < here * N; i += LANES) store(rows + i, load(rows + i) - load(staged + i));
  }
};

template <int N>
void encode(float *residual, int64_t rows, const Slots &slots, float decay, float release, int k, int width,
            float *values, uint8_t *packed) {
  Encoder<N> block;
  Rows<N> walk(slots);
  Packer packer(packed, (rows * (width ? k * width : N) + 7) / 8);
  for (int64_t start = 0; start < rows; start += LANES, values += LANES * k) {
    const int here = rows - start < LANES ? int(rows - start) : LANES;
    float *r = residual + start * N;
    const float *gradient = walk.next(here);
    const bool whole = gradient;
    if (!whole) walk.gather(block.staged), gradient = block.staged;
    Ahead next(r + LANES * N, gradient + LANES * N);
    block.take_in(r, gradient, decay, here, next);
    if (k <= FEW)
      block.few(k);
    else
      block.many(k, width != 0, release), next.lines(N / 4);
    block.write(here, k, width, packer);
    std::memcpy(values, block.said, size_t(here * k) * sizeof(float));
    if (release == 0) continue;
    const float *told = block.said;
    if (k <= FEW)
      add_waves<N, false>(r, here, -release, Few{&told, block.columns, 1, k}, [&] { next.lines(N / 32); });
    else
      next.lines(N / 4), block.take_out(r, here);
    if (!whole) walk.clear_padding(r);
  }
}

}  // namespace
