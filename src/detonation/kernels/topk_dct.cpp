// The exported functions: one pass over the flat computes DCT, top-k and memory, and another pass
// decodes messages. `basis` has the basis vectors, [chunk, chunk].

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

// residual = decay * residual + gradients; selects the k largest DCT coefficients of each row; subtracts `release`
// times their inverse DCT from the residual. With `statistics` the values are signs;
// `negative_zeros` says whether zeros count as negative.
int detonation_encode(float *residual, int64_t rows, int chunk, float *const *gradients, const int64_t *numel,
                      float decay, float release, int k, int width, const float *basis, float *values,
                      uint8_t *statistics, int negative_zeros, uint8_t *indices) {
  const Slots slots{gradients, numel};
  SignWriter writer(reinterpret_cast<uint8_t *>(values), statistics, negative_zeros != 0);
  SignWriter *signs = statistics ? &writer : nullptr;
#define CALL(N) encode<N>(residual, rows, slots, decay, release, k, width, basis, values, signs, indices)
  FOR_CHUNK(CALL)
#undef CALL
}

// residual -= alpha * inverse DCT of the values at their indices; padding remains zero. `few`: see
// `detonation_decode`.
int detonation_release(float *residual, int64_t rows, int chunk, const int64_t *numel, float alpha, int k, int width,
                       const float *values, const uint8_t *indices, int64_t bytes, int few, const float *basis) {
  const Slots slots{nullptr, numel};
  Unpacker unpacker(indices, bytes);
#define CALL(N) release<N>(residual, rows, slots, alpha, values, &unpacker, k, width, few != 0, basis)
  FOR_CHUNK(CALL)
#undef CALL
}

// Writes the mean of messages, or the mean over nonzero values, into one tensor per parameter. With
// `few` a row of the mean is one sum over the coefficients of all messages, times `weight`. With
// `shrink` and `lr` per parameter the tensors are weights, and step along the signs of the mean:
// shrink * weights - lr * sign. With `magnitudes` of blocks the values are signs.
int detonation_decode(float *const *tensors, const int64_t *numel, int64_t rows, int chunk, const float *const *values,
                      const float *const *magnitudes, const uint8_t *const *indices, int64_t bytes, int messages, int k, int width, int few,
                      int nonzero, float weight, const float *basis, const float *shrink, const float *lr) {
  const Slots slots{tensors, numel};
  std::vector<Unpacker> unpackers;
  for (int m = 0; m < messages; ++m) unpackers.emplace_back(indices[m], bytes);
#define CALL(N)                                                                           \
  Decoder<N> block(values, unpackers.data(), messages, k, width, few, nonzero, weight, basis, magnitudes); \
  shrink ? apply_signs<N>(block, slots, rows, shrink, lr) : decode<N>(block, slots, rows)
  FOR_CHUNK(CALL)
#undef CALL
}

// out = coefficients * basis; basis vectors are added in order, from zero on. out and coefficients
// are [rows, chunk], basis is [chunk, chunk].
int detonation_product(const float *coefficients, int64_t rows, int chunk, const float *basis, float *out) {
#define CALL(N) multiply_by_basis<N>(coefficients, rows, basis, out)
  FOR_CHUNK(CALL)
#undef CALL
}

// The indices of the k largest magnitudes of each row, in rising order: [rows, k], one byte each.
int detonation_topk(const float *coefficients, int64_t rows, int chunk, int k, uint8_t *indices) {
#define CALL(N) select<N>(coefficients, rows, k, indices)
  FOR_CHUNK(CALL)
#undef CALL
}

// The first slot whose tensor contains NaN or a magnitude above `limit`; -1 if there is none.
int64_t detonation_beyond(float *const *tensors, const int64_t *numel, int64_t slots, float limit) {
  uint32_t bound;
  std::memcpy(&bound, &limit, sizeof bound);
  for (int64_t s = 0; s < slots; ++s) {
    if (!tensors[s]) continue;
    const float *tensor = tensors[s];
    for (int64_t start = 0; start < numel[s]; start += 4096) {
      const int64_t end = start + 4096 < numel[s] ? start + 4096 : numel[s];
      uint32_t exceeds = 0;
      for (int64_t i = start; i < end; ++i) {
        uint32_t bits;
        std::memcpy(&bits, tensor + i, sizeof bits);
        exceeds |= (bits & 0x7fffffffu) > bound;
      }
      if (exceeds) return s;
    }
  }
  return -1;
}

// weights = shrink * weights - lr * sign(directions), rounded twice like torch.
void detonation_sign_step(float *weights, const float *directions, int64_t count, float shrink, float lr) {
  for (int64_t i = 0; i < count; ++i) {
    const float sign = float((directions[i] > 0) - (directions[i] < 0));
    weights[i] = shrink * weights[i] - lr * sign;
  }
}

}
