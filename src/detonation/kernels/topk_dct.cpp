// DCT, top-k and the memory of decoupled momentum in one pass over a flat matrix, sixteen rows at a time.
//
// A row is a chunk of one parameter. Sixteen rows are transposed so that lane i of every vector belongs to row i; the
// DCT-II is Lee's recursion (B. G. Lee, 1984) on whole vectors, and the k largest come out of an insertion network on
// integer keys: the magnitude's bits with its column in the lowest ones, so that one max and one min keep both.
// GCC vector extensions, no intrinsics: the compiler chooses the instructions of the machine.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

// The parameters: of each a tensor of its own (null where there is none) and how many coordinates it has.
struct Slots {
  float *const *tensor;
  const int64_t *numel;
  int64_t count;
};

// Walks the rows of all slots in order.
struct Cursor {
  const Slots &slots;
  int64_t slot = 0, offset = 0;
  explicit Cursor(const Slots &s) : slots(s) { skip_empty(); }
  void skip_empty() {
    while (slot < slots.count && offset >= slots.numel[slot]) { ++slot; offset = 0; }
  }
  void next(int chunk) { offset += chunk; skip_empty(); }
  int64_t length(int chunk) const { return slots.numel[slot] - offset < chunk ? slots.numel[slot] - offset : chunk; }
  float *tensor() const { return slots.tensor[slot] ? slots.tensor[slot] + offset : nullptr; }
};

template <int S> inline void exchange(Floats &a, Floats &b) {
  Ints low, high;
  for (int j = 0; j < LANES; ++j) {
    low[j] = (j & S) ? LANES + j - S : j;
    high[j] = (j & S) ? LANES + j : j + S;
  }
  const Floats first = __builtin_shuffle(a, b, low), second = __builtin_shuffle(a, b, high);
  a = first;
  b = second;
}

template <int S> inline void stage(Floats *r) {
  for (int i = 0; i < LANES; ++i)
    if (!(i & S)) exchange<S>(r[i], r[i + S]);
}

inline void transpose(Floats *r) {
  stage<8>(r);
  stage<4>(r);
  stage<2>(r);
  stage<1>(r);
}

template <int N> struct Tables {
  float half_secant[N];  // of the stage of length n at [n / 2, n)
  alignas(64) float wave[N][N];  // wave[c]: the orthonormal basis vector of column c
  Tables() {
    for (int n = 2; n <= N; n *= 2)
      for (int i = 0; i < n / 2; ++i) half_secant[n / 2 + i] = float(0.5 / std::cos((i + 0.5) * M_PI / n));
    for (int c = 0; c < N; ++c)
      for (int i = 0; i < N; ++i)
        wave[c][i] = float(std::cos(M_PI / N * (i + 0.5) * c) * std::sqrt((c ? 2.0 : 1.0) / N));
  }
};

template <int N> const Tables<N> &tables() {
  static const Tables<N> t;
  return t;
}

template <int N> struct Dct {
  static inline void run(Floats *x, Floats *t, const float *half_secant) {
    constexpr int H = N / 2;
    for (int i = 0; i < H; ++i) {
      const Floats a = x[i], b = x[N - 1 - i];
      t[i] = a + b;
      t[i + H] = (a - b) * half_secant[H + i];
    }
    Dct<H>::run(t, x, half_secant);
    Dct<H>::run(t + H, x + H, half_secant);
    for (int i = 0; i < H - 1; ++i) {
      x[2 * i] = t[i];
      x[2 * i + 1] = t[i + H] + t[i + H + 1];
    }
    x[N - 2] = t[H - 1];
    x[N - 1] = t[N - 1];
  }
};

template <> struct Dct<1> {
  static inline void run(Floats *, Floats *, const float *) {}
};

inline Ints keyed(Floats x, int column, int mask) {
  Ints bits;
  std::memcpy(&bits, &x, sizeof bits);
  return (bits & 0x7fffffff & ~mask) | (mask - column);
}

template <int N, int K> void largest(const Floats *x, int k, Ints *best) {
  // K is k where it is known to the compiler, else 0
  const int levels = K ? K : k;
  for (int j = 0; j < levels; ++j) best[j] = Ints{} - 1;
  for (int c = 0; c < N; ++c) {
    Ints key = keyed(x[c], c, N - 1);
    for (int j = 0; j < levels; ++j) {
      const Ints kept = best[j];
      best[j] = key > kept ? key : kept;
      key = key > kept ? kept : key;
    }
  }
}

template <int N> void select_block(const Floats *x, int k, Ints *best) {
  switch (k) {
    case 1: return largest<N, 1>(x, k, best);
    case 2: return largest<N, 2>(x, k, best);
    case 4: return largest<N, 4>(x, k, best);
    case 8: return largest<N, 8>(x, k, best);
    default: return largest<N, 0>(x, k, best);
  }
}

template <int N> void sort(int64_t *column, int k) {
  uint64_t marked[(N + 63) / 64] = {};
  for (int j = 0; j < k; ++j) marked[column[j] / 64] |= uint64_t(1) << (column[j] % 64);
  for (int word = 0; word < (N + 63) / 64; ++word)
    for (uint64_t left = marked[word]; left; left &= left - 1) *column++ = word * 64 + __builtin_ctzll(left);
}

template <int N>
void encode(float *residual, int64_t rows, const Slots &slots, float decay, float release, int k, bool ascending,
            float *values, int64_t *columns) {
  const Tables<N> &table = tables<N>();
  alignas(64) Floats x[N], scratch[N];
  Ints best[N];
  Cursor cursor(slots);
  int64_t lengths[LANES];
  const float middle = std::sqrt(2.0f / N), first = std::sqrt(1.0f / N);
  for (int64_t start = 0; start < rows; start += LANES) {
    const int here = rows - start < LANES ? int(rows - start) : LANES;
    for (int lane = 0; lane < here; ++lane) {
      float *row = residual + (start + lane) * N;
      const float *gradient = cursor.tensor();
      lengths[lane] = cursor.length(N);
      if (gradient && lengths[lane] == N)
        for (int i = 0; i < N; ++i) row[i] = decay * row[i] + gradient[i];
      else if (gradient)
        for (int i = 0; i < lengths[lane]; ++i) row[i] = decay * row[i] + gradient[i];
      else
        for (int i = 0; i < N; ++i) row[i] *= decay;
      cursor.next(N);
    }
    for (int block = 0; block < N; block += LANES) {
      for (int lane = 0; lane < LANES; ++lane)
        if (lane < here)
          std::memcpy(&x[block + lane], residual + (start + lane) * N + block, sizeof(Floats));
        else
          x[block + lane] = Floats{};
      transpose(x + block);
    }
    Dct<N>::run(x, scratch, table.half_secant);
    x[0] *= first;
    for (int c = 1; c < N; ++c) x[c] *= middle;
    select_block<N>(x, k, best);
    for (int lane = 0; lane < here; ++lane) {
      float *value = values + (start + lane) * k, *row = residual + (start + lane) * N;
      int64_t *column = columns + (start + lane) * k;
      for (int j = 0; j < k; ++j) column[j] = (N - 1) - (best[j][lane] & (N - 1));
      if (ascending) sort<N>(column, k);
      for (int j = 0; j < k; ++j) value[j] = x[column[j]][lane];
      if (release == 0) continue;
      for (int j = 0; j < k; ++j) {
        const float out = release * value[j], *wave = table.wave[column[j]];
        if (lengths[lane] == N)
          for (int i = 0; i < N; ++i) row[i] -= out * wave[i];
        else
          for (int i = 0; i < lengths[lane]; ++i) row[i] -= out * wave[i];
      }
    }
  }
}

template <int N>
void release(float *residual, int64_t rows, const Slots &slots, float share, int k, const float *values,
             const int64_t *columns) {
  const Tables<N> &table = tables<N>();
  Cursor cursor(slots);
  for (int64_t r = 0; r < rows; ++r) {
    float *row = residual + r * N;
    const int64_t length = cursor.length(N);
    cursor.next(N);
    for (int j = 0; j < k; ++j) {
      const float out = share * values[r * k + j], *wave = table.wave[columns[r * k + j]];
      for (int i = 0; i < length; ++i) row[i] -= out * wave[i];
    }
  }
}

// Adds the waves of one row of all messages up: the mean over all of them.
template <int N>
inline void mean_row(float *row, int64_t r, const float *const *values, const int64_t *const *columns,
                     int64_t messages, int k) {
  const Tables<N> &table = tables<N>();
  const float share = 1.0f / float(messages);
  for (int64_t m = 0; m < messages; ++m)
    for (int j = 0; j < k; ++j) {
      const float weight = share * values[m][r * k + j], *wave = table.wave[columns[m][r * k + j]];
      for (int i = 0; i < N; ++i) row[i] += weight * wave[i];
    }
}

// The same over those that sent a coefficient other than 0.
template <int N>
inline void senders_row(float *row, int64_t r, const float *const *values, const int64_t *const *columns,
                        int64_t messages, int k) {
  const Tables<N> &table = tables<N>();
  alignas(64) float sum[N] = {};
  int count[N] = {};
  for (int64_t m = 0; m < messages; ++m)
    for (int j = 0; j < k; ++j) {
      const float value = values[m][r * k + j];
      const int64_t column = columns[m][r * k + j];
      sum[column] += value;
      count[column] += value != 0;
    }
  for (int c = 0; c < N; ++c) {
    if (!count[c]) continue;
    const float weight = sum[c] / float(count[c]);
    for (int i = 0; i < N; ++i) row[i] += weight * table.wave[c][i];
  }
}

template <int N>
void decode(const Slots &slots, int64_t rows, const float *const *values, const int64_t *const *columns,
            int64_t messages, int k, bool senders) {
  Cursor cursor(slots);
  for (int64_t r = 0; r < rows; ++r) {
    alignas(64) float row[N] = {};
    senders ? senders_row<N>(row, r, values, columns, messages, k) : mean_row<N>(row, r, values, columns, messages, k);
    std::memcpy(cursor.tensor(), row, size_t(cursor.length(N)) * sizeof(float));
    cursor.next(N);
  }
}

}  // namespace

#define FOR_CHUNK(call) \
  switch (chunk) {      \
    case 16: call(16); return 0;  \
    case 32: call(32); return 0;  \
    case 64: call(64); return 0;  \
    case 128: call(128); return 0;  \
    case 256: call(256); return 0;  \
    default: return 1;  \
  }

extern "C" {

// residual = decay * residual + gradients; the k largest DCT coefficients of each row; residual -= release * them.
int detonation_encode(float *residual, int64_t rows, int chunk, float *const *gradients, const int64_t *numel,
                      int64_t slots, float decay, float release, int k, int ascending, float *values,
                      int64_t *columns) {
  const Slots all{gradients, numel, slots};
#define CALL(N) encode<N>(residual, rows, all, decay, release, k, ascending != 0, values, columns)
  FOR_CHUNK(CALL)
#undef CALL
}

// residual -= share * the values at their columns, where there is no padding.
int detonation_release(float *residual, int64_t rows, int chunk, const int64_t *numel, int64_t slots, float share,
                       int k, const float *values, const int64_t *columns) {
  const Slots all{nullptr, numel, slots};
#define CALL(N) release<N>(residual, rows, all, share, k, values, columns)
  FOR_CHUNK(CALL)
#undef CALL
}

// The mean of messages over replicas or senders, back from the DCT, into one tensor a parameter.
int detonation_decode(float *const *targets, const int64_t *numel, int64_t slots, int64_t rows, int chunk,
                      const float *const *values, const int64_t *const *columns, int64_t messages, int k,
                      int senders) {
  const Slots all{targets, numel, slots};
#define CALL(N) decode<N>(all, rows, values, columns, messages, k, senders != 0)
  FOR_CHUNK(CALL)
#undef CALL
}

// The first slot whose tensor holds NaN or a magnitude above `limit`; -1 where none does.
int64_t detonation_beyond(float *const *tensors, const int64_t *numel, int64_t slots, float limit) {
  uint32_t most;
  std::memcpy(&most, &limit, sizeof most);
  for (int64_t s = 0; s < slots; ++s) {
    if (!tensors[s]) continue;
    const float *tensor = tensors[s];
    for (int64_t start = 0; start < numel[s]; start += 4096) {
      const int64_t end = start + 4096 < numel[s] ? start + 4096 : numel[s];
      uint32_t odd = 0;
      for (int64_t i = start; i < end; ++i) {
        uint32_t bits;
        std::memcpy(&bits, tensor + i, sizeof bits);
        odd |= (bits & 0x7fffffffu) > most;
      }
      if (odd) return s;
    }
  }
  return -1;
}

// weights = shrink * weights - lr * sign(directions), rounded twice as torch rounds it.
__attribute__((optimize("fp-contract=off"))) void detonation_sign_step(float *weights, const float *directions, int64_t count, float shrink, float lr) {
  for (int64_t i = 0; i < count; ++i) {
    const float sign = float((directions[i] > 0) - (directions[i] < 0));
    weights[i] = shrink * weights[i] - lr * sign;
  }
}

}
