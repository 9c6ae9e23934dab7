// DCT, top-k and the memory of decoupled momentum in one pass over a flat matrix; messages back in another.
//
// What is told stands in the order of columns. The inverse is a sum of basis vectors where a row has few coefficients,
// and the transposed DCT of several rows at once where it has many.

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <vector>

#include "columns.h"
#include "dct.h"
#include "rows.h"
#include "select.h"

namespace {

// Asks for the LANES rows after these, a quarter at a time between other work: rows that are read and written once do
// not come from memory fast enough by themselves.
template <int N> INLINE void ahead(const float *rows, int quarter) {
  for (int i = 0; i < LANES * N / 4; i += LANES) __builtin_prefetch(rows + LANES * N + LANES * N / 4 * quarter + i, 1);
}

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

// rows = (FRESH ? 0 : rows) + weight * the coefficients, back from the DCT.
template <int N, bool FRESH>
void add_waves(const Waves<N> &waves, float *rows, int here, float weight, const Few &few) {
  constexpr int V = N / LANES;
  for (int row = 0; row < here; ++row, rows += N) {
    Floats sum[V];
#pragma GCC unroll 16
    for (int b = 0; b < V; ++b) sum[b] = FRESH ? Floats{} : load(rows + b * LANES);
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

template <int N> struct Encoder {
  alignas(64) Floats x[N], told[N], scratch[N];
  alignas(64) float staged[LANES * N];
  Marks<N> marks[LANES];
  uint8_t columns[LANES * N];

  // x = the coefficients of LANES rows.
  void coefficients(const float *rows, int here) {
    to_lanes<N>(rows, here, x);
    Dct<N>::forward(x, scratch);
    x[0] *= norm<N>(0);
    for (int c = 1; c < N; ++c) x[c] *= norm<N>(1);
  }

  // marks = the k largest of each row; told = share of them, scaled for the transposed DCT, zeros elsewhere.
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

  void write(int here, int k, int width, float *values, Packer &packer) {
#ifdef __AVX512F__
    if (k > FEW) {
      write_many(here, k, width != 0, values);
    } else
#endif
      write_few(here, k, values);
    for (int lane = 0; lane < here; ++lane)
      if (width)
        for (int j = 0; j < k; ++j) packer.put(columns[lane * k + j], width);
      else
        for (int w = 0; w < Marks<N>::WORDS; ++w) packer.put(marks[lane].word[w], Marks<N>::BITS);
  }

  void write_few(int here, int k, float *values) {
    const float *coefficients = reinterpret_cast<const float *>(x);
    uint8_t *column = columns;
    for (int lane = 0; lane < here; ++lane, column += k) {
      list<N>(marks[lane], k, column);
      for (int j = 0; j < k; ++j) *values++ = coefficients[column[j] * LANES + lane];
    }
  }

#ifdef __AVX512F__
  void write_many(int here, int k, bool listed, float *values) {
    to_rows<N>(x, here, staged);
    float row[N + LANES];
    for (int lane = 0; lane < here; ++lane, values += k) {
      if (listed) list<N>(marks[lane], k, columns + lane * k);
      float *to = row;
      for (int b = 0; b < N; b += LANES) {
        const __mmask16 mask = marks[lane].at(b);
        _mm512_storeu_ps(to, _mm512_maskz_compress_ps(mask, __m512(load(staged + lane * N + b))));
        to += __builtin_popcount(mask);
      }
      std::memcpy(values, row, size_t(k) * sizeof(float));
    }
  }
#endif

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
  const Waves<N> &waves = Waves<N>::table();
  Encoder<N> block;
  Rows<N> walk(slots);
  Packer packer(packed);
  for (int64_t start = 0; start < rows; start += LANES, values += LANES * k) {
    const int here = rows - start < LANES ? int(rows - start) : LANES;
    float *r = residual + start * N;
    const float *gradient = walk.next(here);
    const bool whole = gradient;
    if (!whole) walk.gather(block.staged), gradient = block.staged;
    for (int i = 0; i < here * N; i += LANES) store(r + i, decay * load(r + i) + load(gradient + i));
    ahead<N>(r, 0), ahead<N>(gradient, 0);
    block.coefficients(r, here);
    ahead<N>(r, 1), ahead<N>(gradient, 1);
    block.mark(k, k > FEW ? release : 0);
    ahead<N>(r, 2), ahead<N>(gradient, 2);
    block.write(here, k, width, values, packer);
    ahead<N>(r, 3), ahead<N>(gradient, 3);
    if (release == 0) continue;
    const float *told = values;
    if (k <= FEW)
      add_waves<N, false>(waves, r, here, -release, Few{&told, block.columns, 1, k});
    else
      block.take_out(r, here);
    if (!whole) walk.clear_padding(r);
  }
}

// What messages say of LANES rows.
template <int N> struct Decoder {
  const float *const *values;
  Unpacker *columns;
  int messages, k, width;
  bool senders;
  float weight;
  alignas(64) Floats sum[N], count[N], scratch[N];
  uint8_t column[LANES * (N > FEW ? N : FEW)];

  // rows = weight * the sum of what they say of rows `start` and on, or their mean over senders.
  void run(int64_t start, int here, float *rows) {
    if (!senders && messages * k <= FEW) {
      const float *value[FEW];
      for (int m = 0; m < messages; ++m) {
        list_columns(columns[m], here, column + m * LANES * k);
        value[m] = values[m] + start * k;
      }
      return add_waves<N, true>(Waves<N>::table(), rows, here, weight, Few{value, column, messages, k});
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
    if (width)
      for (int i = 0; i < here * k; ++i) column[i] = uint8_t(unpacker.get(width));
    else
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
    to_lanes<N>(rows, here, sum);
  }

#ifdef __AVX512F__
  void add_marked(Unpacker &unpacker, const float *value, float *rows, int here) {
    for (int row = 0; row < here; ++row, rows += N) {
      const Marks<N> marks(unpacker);
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

template <int N>
void decode(const Slots &slots, int64_t rows, const float *const *values, Unpacker *columns, int messages, int k,
            int width, bool senders) {
  Decoder<N> block{values, columns, messages, k, width, senders, senders ? 1.0f : 1.0f / float(messages)};
  Rows<N> walk(slots);
  alignas(64) float staged[LANES * N];
  for (int64_t start = 0; start < rows; start += LANES) {
    const int here = rows - start < LANES ? int(rows - start) : LANES;
    float *target = walk.next(here);
    if (target)
      for (int quarter = 0; quarter < 4; ++quarter) ahead<N>(target, quarter);
    block.run(start, here, target ? target : staged);
    if (!target) walk.scatter(staged);
  }
}

template <int N>
void release(float *residual, int64_t rows, const Slots &slots, float share, const float *values, Unpacker *columns,
             int k, int width) {
  Decoder<N> block{&values, columns, 1, k, width, false, share};
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

#define FOR_CHUNK(call)             \
  switch (chunk) {                  \
    case 16: call(16); return 0;    \
    case 32: call(32); return 0;    \
    case 64: call(64); return 0;    \
    case 128: call(128); return 0;  \
    case 256: call(256); return 0;  \
    default: return 1;              \
  }

extern "C" {

// residual = decay * residual + gradients; the k largest DCT coefficients of each row; residual -= release * them.
int detonation_encode(float *residual, int64_t rows, int chunk, float *const *gradients, const int64_t *numel,
                      float decay, float release, int k, int width, float *values, uint8_t *columns) {
  const Slots slots{gradients, numel};
#define CALL(N) encode<N>(residual, rows, slots, decay, release, k, width, values, columns)
  FOR_CHUNK(CALL)
#undef CALL
}

// residual -= share * the values at their columns, where there is no padding.
int detonation_release(float *residual, int64_t rows, int chunk, const int64_t *numel, float share, int k, int width,
                       const float *values, const uint8_t *columns, int64_t bytes) {
  const Slots slots{nullptr, numel};
  Unpacker unpacker(columns, bytes);
#define CALL(N) release<N>(residual, rows, slots, share, values, &unpacker, k, width)
  FOR_CHUNK(CALL)
#undef CALL
}

// The mean of messages over replicas or senders, back from the DCT, into one tensor a parameter.
int detonation_decode(float *const *targets, const int64_t *numel, int64_t rows, int chunk, const float *const *values,
                      const uint8_t *const *columns, int64_t bytes, int messages, int k, int width, int senders) {
  const Slots slots{targets, numel};
  std::vector<Unpacker> unpackers;
  for (int m = 0; m < messages; ++m) unpackers.emplace_back(columns[m], bytes);
#define CALL(N) decode<N>(slots, rows, values, unpackers.data(), messages, k, width, senders != 0)
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
__attribute__((optimize("fp-contract=off"))) void detonation_sign_step(float *weights, const float *directions,
                                                                       int64_t count, float shrink, float lr) {
  for (int64_t i = 0; i < count; ++i) {
    const float sign = float((directions[i] > 0) - (directions[i] < 0));
    weights[i] = shrink * weights[i] - lr * sign;
  }
}

}
