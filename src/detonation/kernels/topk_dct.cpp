// DCT, top-k and the memory of decoupled momentum in one pass over a flat matrix; messages back in another.

#include <vector>

#include "decode.h"
#include "encode.h"

#define FOR_CHUNK(call)             \
  switch (chunk) {                  \
    case 16: { call(16); return 0; }  \
    case 32: { call(32); return 0; }  \
    case 64: { call(64); return 0; }  \
    case 128: { call(128); return 0; } \
    case 256: { call(256); return 0; } \
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

// The mean of messages over replicas or senders, back from the DCT, into one tensor a parameter; or, where there is a
// `shrink` and a `lr` for each, the tensors are weights that follow its signs: shrink * weights - lr * sign.
int detonation_decode(float *const *tensors, const int64_t *numel, int64_t rows, int chunk, const float *const *values,
                      const uint8_t *const *columns, int64_t bytes, int messages, int k, int width, int senders,
                      const float *shrink, const float *lr) {
  const Slots slots{tensors, numel};
  const float weight = senders ? 1.0f : 1.0f / float(messages);
  std::vector<Unpacker> unpackers;
  for (int m = 0; m < messages; ++m) unpackers.emplace_back(columns[m], bytes);
#define CALL(N)                                                                           \
  Decoder<N> block(values, unpackers.data(), messages, k, width, senders != 0, weight); \
  shrink ? follow<N>(block, slots, rows, shrink, lr) : decode<N>(block, slots, rows)
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
