// The k-th largest coefficient of each row, by a sorting network on integer keys: the bits of the magnitude with the
// index in the lowest bits, so that all keys of a row differ.

#pragma once

#include "lanes.h"

namespace {

template <int N> INLINE Ints keyed(Floats x, int index) {
  return (bits(x) & (0x7fffffff & ~(N - 1))) | (N - 1 - index);
}

INLINE void order(Ints &a, Ints &b) {
  const Ints larger = a > b ? a : b;
  b = a > b ? b : a;
  a = larger;
}

// Sorting networks of more than SHORT keys are separate functions and not unrolled: the unrolled
// network of 256 keys would have about ten thousand instructions.
constexpr int SHORT = 16;
template <int P> void long_clean(Ints *v);
template <int P> void long_sort(Ints *v);

// Sorts a bitonic sequence, largest first.
template <int P> INLINE void clean(Ints *v) {
  if constexpr (P > SHORT) {
    long_clean<P>(v);
  } else if constexpr (P > 1) {
#pragma GCC unroll 16
    for (int i = 0; i < P / 2; ++i) order(v[i], v[i + P / 2]);
    clean<P / 2>(v);
    clean<P / 2>(v + P / 2);
  }
}

template <int P> INLINE void sort(Ints *v) {
  if constexpr (P > SHORT) {
    long_sort<P>(v);
  } else if constexpr (P > 1) {
    sort<P / 2>(v);
    sort<P / 2>(v + P / 2);
#pragma GCC unroll 16
    for (int i = 0; i < P / 2; ++i) order(v[i], v[P - 1 - i]);
    clean<P / 2>(v);
    clean<P / 2>(v + P / 2);
  }
}

template <int P> __attribute__((noinline)) void long_clean(Ints *v) {
  for (int i = 0; i < P / 2; ++i) order(v[i], v[i + P / 2]);
  clean<P / 2>(v);
  clean<P / 2>(v + P / 2);
}

template <int P> __attribute__((noinline)) void long_sort(Ints *v) {
  sort<P / 2>(v);
  sort<P / 2>(v + P / 2);
  for (int i = 0; i < P / 2; ++i) order(v[i], v[P - 1 - i]);
  clean<P / 2>(v);
  clean<P / 2>(v + P / 2);
}

// best = the P largest keys, largest first. Sorts groups of P keys in turn and merges each with the best so far.
template <int N, int P> INLINE void largest(const Floats *x, Ints *best) {
  Ints group[P];
#pragma GCC unroll 16
  for (int c = 0; c < P; ++c) best[c] = keyed<N>(x[c], c);
  sort<P>(best);
  for (int start = P; start < N; start += P) {
#pragma GCC unroll 16
    for (int c = 0; c < P; ++c) group[c] = keyed<N>(x[start + c], start + c);
    sort<P>(group);
#pragma GCC unroll 16
    for (int c = 0; c < P; ++c) best[c] = best[c] > group[P - 1 - c] ? best[c] : group[P - 1 - c];
    clean<P>(best);
  }
}

template <int N, int P> __attribute__((noinline)) Ints kth_of_groups(const Floats *x, int k) {
  Ints best[P];
  largest<N, P>(x, best);
  return best[k - 1];
}

// Returns the k-th largest key of each row. P is the smallest power of two that is at least k.
template <int N, int P = 1> INLINE Ints kth(const Floats *x, int k) {
  if constexpr (P < N)
    if (k > P) return kth<N, 2 * P>(x, k);
  return kth_of_groups<N, P>(x, k);
}

}  // namespace
