// Access to the rows of a flat in place, in the tensors of the parameters, without a copy of the
// whole matrix.

#pragma once

#include "lanes.h"

namespace {

// The parameters: the tensor of each (null if it is missing) and its number of coordinates.
struct Slots {
  float *const *tensor;
  const int64_t *numel;
};

// Iterates over the rows of all slots (parameters), a few rows at a time.
template <int N> class Rows {
 public:
  explicit Rows(const Slots &slots) : slots_(slots) {}

  // Returns the next `valid` rows if they are contiguous in one tensor and without padding, else null.
  float *next(int valid) {
    skip_empty();
    if (tensor() && slots_.numel[slot_] - offset_ >= valid * N) {
      float *at = tensor() + offset_;
      offset_ += valid * N;
      return at;
    }
    valid_ = valid;
    for (int row = 0; row < valid; ++row) {
      skip_empty();
      of_[row] = slot_;
      const int64_t left = slots_.numel[slot_] - offset_;
      at_[row] = tensor() ? tensor() + offset_ : nullptr;
      length_[row] = left < N ? left : N;
      offset_ += N;
    }
    return nullptr;
  }

  // After `next` returned null: `gather` copies the rows out, with zeros for missing tensors and padding; `scatter`
  // copies them back; `clear_padding` zeroes their padding.
  void gather(float *rows) const {
    for (int row = 0; row < valid_; ++row) {
      const int64_t length = at_[row] ? length_[row] : 0;
      if (length) std::memcpy(rows + row * N, at_[row], size_t(length) * sizeof(float));
      std::memset(rows + row * N + length, 0, size_t(N - length) * sizeof(float));
    }
  }

  void scatter(const float *rows) const {
    for (int row = 0; row < valid_; ++row)
      if (at_[row]) std::memcpy(at_[row], rows + row * N, size_t(length_[row]) * sizeof(float));
  }

  void clear_padding(float *rows) const {
    for (int row = 0; row < valid_; ++row)
      if (length_[row] < N) std::memset(rows + row * N + length_[row], 0, size_t(N - length_[row]) * sizeof(float));
  }

  // The slot of the rows that `next` returned, or the slot of one row after `next` returned null.
  int64_t slot() const { return slot_; }
  int64_t slot(int row) const { return of_[row]; }

 private:
  const Slots slots_;
  int64_t slot_ = 0, offset_ = 0, length_[LANES], of_[LANES];
  float *at_[LANES];
  int valid_ = 0;

  float *tensor() const { return slots_.tensor ? slots_.tensor[slot_] : nullptr; }

  void skip_empty() {
    while (offset_ >= slots_.numel[slot_]) { ++slot_; offset_ = 0; }
  }
};

}  // namespace
