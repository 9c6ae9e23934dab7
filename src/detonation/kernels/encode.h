// Encodes gradients to a message, LANES rows at a time: memory, DCT, selection, and removal of the message from memory.

#pragma once

#include "indices.h"
#include "dct.h"
#include "rows.h"
#include "select.h"
#include "basis.h"
#include "signs.h"

namespace {

// Up to FEW coefficients per row, a sorting network lists them all. For more coefficients, the
// network finds only the k-th largest.
constexpr int FEW = 12;

template <int N> struct Encoder {
  alignas(64) Floats x[N], sent[N], scratch[N];
  alignas(64) float staged[LANES * N];
  alignas(64) float selected[LANES * N + LANES];  // the selected values, row by row
  alignas(64) uint8_t indices[LANES * N + 4];
  RowBitmap<N> marks[LANES];

  // rows = decay * rows + gradient; x = the coefficients of LANES rows.
  void accumulate(float *rows, const float *gradient, float decay, int valid, Prefetcher &next) {
    for (int i = 0; i < valid * N; i += LANES) store(rows + i, decay * load(rows + i) + load(gradient + i));
    to_lanes<N>(rows, valid, x, [&] { next.lines(LANES / 4); });
    next.lines(N / 4);
    Dct<N>::template forward<true>(x, scratch);
  }

  // Finds the k largest values of each row, for k up to FEW: `selected` and `indices`, in the order of
  // indices.
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
      const Ints index = (N - 1 - best[j]) & (N - 1);
      value[j] = pick(x, index);
      four[j / 4] |= index << 8 * (j % 4);
    }
#pragma GCC unroll 4
    for (int j = 0; j < FILLED; j += 4) transpose_fours(value + j);
    // copies four numbers at a time: the copy of a lane overwrites the excess numbers of the lane
    // before
    for (int lane = 0; lane < LANES; ++lane)
      for (int j = 0; j < k; j += 4) {
        const float *block = reinterpret_cast<const float *>(value + j + lane % 4) + lane / 4 * 4;
        std::memcpy(selected + lane * k + j, block, 4 * sizeof(float));
        std::memcpy(indices + lane * k + j, reinterpret_cast<const int32_t *>(four + j / 4) + lane, 4);
      }
  }

  // Finds the k largest values of each row, for any k; `indices` only if `listed`. Also fills
  // `sent` with alpha times the selected coefficients, scaled for the transposed DCT, and with
  // zeros elsewhere.
  void many(int k, bool listed, float alpha) {
    mark(k, alpha);
    to_rows<N>(x, LANES, staged);
    float *to = selected;
    for (int lane = 0; lane < LANES; ++lane, to += k) {
      if (listed) marked_indices<N>(marks[lane], k, indices + lane * k);
#ifdef __AVX512F__
      float *next = to;
      for (int b = 0; b < N; b += LANES) {
        const __mmask16 mask = marks[lane].at(b);
        _mm512_storeu_ps(next, _mm512_maskz_compress_ps(mask, __m512(load(staged + lane * N + b))));
        next += __builtin_popcount(mask);
      }
#else
      if (!listed) marked_indices<N>(marks[lane], k, indices + lane * k);
      for (int j = 0; j < k; ++j) to[j] = staged[lane * N + indices[lane * k + j]];
#endif
    }
  }

  void mark(int k, float alpha) {
    const Ints least = kth<N>(x, k);
    for (int w = 0; w < RowBitmap<N>::WORDS; ++w) {
      Ints word = {};
#pragma GCC unroll 32
      for (int i = 0; i < RowBitmap<N>::BITS; ++i) {
        const int c = 32 * w + i;
        const Ints chosen = keyed<N>(x[c], c) >= least;
        word |= chosen & int(1u << i);
        if (alpha != 0) sent[c] = masked(chosen, x[c] * (alpha * norm<N>(c)));
      }
      for (int lane = 0; lane < LANES; ++lane) marks[lane].word[w] = uint32_t(word[lane]);
    }
  }

  void write(int valid, int k, int width, Packer &packer) {
    if (width) return packer.put_bytes(indices, valid * k, width);
    for (int lane = 0; lane < valid; ++lane) {
      if (k <= FEW) marks[lane] = RowBitmap<N>(indices + lane * k, k);
      for (int w = 0; w < RowBitmap<N>::WORDS; ++w) packer.put(marks[lane].word[w], RowBitmap<N>::BITS);
    }
  }

  // rows -= inverse DCT of `sent`.
  void remove_sent(float *rows, int valid) {
    Dct<N>::transposed(sent, scratch);
    to_rows<N>(sent, valid, staged);
    for (int i = 0; i < valid * N; i += LANES) store(rows + i, load(rows + i) - load(staged + i));
  }
};

// See `detonation_topk`.
template <int N> void select(const float *coefficients, int64_t rows, int k, uint8_t *indices) {
  Encoder<N> block;
  for (int64_t start = 0; start < rows; start += LANES) {
    const int valid = rows - start < LANES ? int(rows - start) : LANES;
    to_lanes<N>(coefficients + start * N, valid, block.x, [] {});
    if (k <= FEW) {
      block.few(k);
    } else {
      block.mark(k, 0);
      for (int lane = 0; lane < valid; ++lane) marked_indices<N>(block.marks[lane], k, block.indices + lane * k);
    }
    std::memcpy(indices + start * k, block.indices, size_t(valid * k));
  }
}

template <int N>
void encode(float *residual, int64_t rows, const Slots &slots, float decay, float release, int k, int width,
            const float *basis, float *values, SignWriter *signs, uint8_t *packed) {
  Encoder<N> block;
  Rows<N> walk(slots);
  Packer packer(packed, (rows * (width ? k * width : N) + 7) / 8);
  for (int64_t start = 0; start < rows; start += LANES) {
    const int valid = rows - start < LANES ? int(rows - start) : LANES;
    float *r = residual + start * N;
    const float *gradient = walk.next(valid);
    const bool whole = gradient;
    if (!whole) walk.gather(block.staged), gradient = block.staged;
    Prefetcher next(r + LANES * N, gradient + LANES * N);
    block.accumulate(r, gradient, decay, valid, next);
    if (k <= FEW)
      block.few(k);
    else
      block.many(k, width != 0, release), next.lines(N / 4);
    block.write(valid, k, width, packer);
    if (signs)
      signs->add(block.selected, valid * k);
    else
      std::memcpy(values + start * k, block.selected, size_t(valid * k) * sizeof(float));
    if (release == 0) continue;
    const float *sent = block.selected;
    if (k <= FEW)
      add_basis_vectors<N, false>(r, valid, -release, basis, FewCoefficients{&sent, block.indices, 1, k},
                                  [&] { next.lines(N / 32); });
    else
      next.lines(N / 4), block.remove_sent(r, valid);
    if (!whole) walk.clear_padding(r);
  }
  if (signs) signs->finish();
}

}  // namespace
