// The DCT-II of rows in SIMD lanes and its transpose, by Lee's recursion (B. G. Lee, 1984). Only
// `forward<true>` scales the coefficients to an orthonormal basis.

#pragma once

#include <cmath>

#include "lanes.h"

namespace {

struct Secants {
  float of[256];  // the factors of the stage of length n are at [n / 2, n)
  Secants() {
    for (int n = 2; n <= 256; n *= 2)
      for (int i = 0; i < n / 2; ++i) of[n / 2 + i] = float(0.5 / std::cos((i + 0.5) * M_PI / n));
  }
};
const Secants secants;

// The factor that makes basis vector c orthonormal.
template <int N> INLINE float norm(int c) { return std::sqrt((c ? 2.0f : 1.0f) / N); }

// The DCT of rows of N coefficients, in place in x; t is scratch of the same length. Dct<16> keeps
// all coefficients in registers.
template <int N> struct Dct {
  template <bool NORMAL = false> static void forward(Floats *x, Floats *t) {  // NORMAL: orthonormal
    constexpr int H = N / 2;
    for (int i = 0; i < H; ++i) {
      const Floats a = x[i], b = x[N - 1 - i];
      t[i] = a + b;
      t[i + H] = (a - b) * secants.of[H + i];
    }
    Dct<H>::forward(t, x);
    Dct<H>::forward(t + H, x + H);
    const float scale = NORMAL ? norm<N>(1) : 1;
    x[0] = t[0] * (NORMAL ? norm<N>(0) : 1);
    for (int i = 0; i < H - 1; ++i) {
      x[2 * i + 1] = (t[i + H] + t[i + H + 1]) * scale;
      x[2 * i + 2] = t[i + 1] * scale;
    }
    x[N - 1] = t[N - 1] * scale;
  }

  static void transposed(Floats *x, Floats *t) {
    constexpr int H = N / 2;
    t[0] = x[0];
    t[H] = x[1];
    for (int i = 1; i < H; ++i) {
      t[i] = x[2 * i];
      t[i + H] = x[2 * i + 1] + x[2 * i - 1];
    }
    Dct<H>::transposed(t, x);
    Dct<H>::transposed(t + H, x + H);
    for (int i = 0; i < H; ++i) {
      const Floats a = t[i], b = t[i + H] * secants.of[H + i];
      x[i] = a + b;
      x[N - 1 - i] = a - b;
    }
  }
};

template <int N> INLINE void forward_registers(Floats *v) {
  if constexpr (N > 1) {
    constexpr int H = N / 2;
    Floats a[H], b[H];
#pragma GCC unroll 16
    for (int i = 0; i < H; ++i) {
      a[i] = v[i] + v[N - 1 - i];
      b[i] = (v[i] - v[N - 1 - i]) * secants.of[H + i];
    }
    forward_registers<H>(a);
    forward_registers<H>(b);
#pragma GCC unroll 16
    for (int i = 0; i < H; ++i) {
      v[2 * i] = a[i];
      v[2 * i + 1] = i + 1 < H ? b[i] + b[i + 1] : b[i];
    }
  }
}

template <int N> INLINE void transposed_registers(Floats *v) {
  if constexpr (N > 1) {
    constexpr int H = N / 2;
    Floats a[H], b[H];
#pragma GCC unroll 16
    for (int i = 0; i < H; ++i) {
      a[i] = v[2 * i];
      b[i] = i ? v[2 * i + 1] + v[2 * i - 1] : v[1];
    }
    transposed_registers<H>(a);
    transposed_registers<H>(b);
#pragma GCC unroll 16
    for (int i = 0; i < H; ++i) {
      const Floats c = b[i] * secants.of[H + i];
      v[i] = a[i] + c;
      v[N - 1 - i] = a[i] - c;
    }
  }
}

template <> struct Dct<16> {
  template <bool NORMAL = false> static __attribute__((noinline)) void forward(Floats *x, Floats *) {
    Floats v[16];
    std::memcpy(v, x, sizeof v);
    forward_registers<16>(v);
#pragma GCC unroll 16
    for (int c = 0; NORMAL && c < 16; ++c) v[c] *= norm<16>(c);
    std::memcpy(x, v, sizeof v);
  }

  static __attribute__((noinline)) void transposed(Floats *x, Floats *) {
    Floats v[16];
    std::memcpy(v, x, sizeof v);
    transposed_registers<16>(v);
    std::memcpy(x, v, sizeof v);
  }
};

}  // namespace
