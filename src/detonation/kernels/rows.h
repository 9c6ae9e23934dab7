// The rows of a flat matrix where they really lie: in one tensor a parameter.

#pragma once

#include "lanes.h"

namespace {

// The parameters: of each a tensor (null where there is none) and how many coordinates it has.
struct Slots {
  float *const *tensor;
  const int64_t *numel;
};

// Walks the rows of all slots in order, a few at a time.
template <int N> class Rows {
 public:
  explicit Rows(const Slots &slots) : slots_(slots) {}

  // Where the next `here` rows lie one after another, whole and in one tensor; null where they do not.
  float *next(int here) {
    skip_empty();
    if (tensor() && slots_.numel[slot_] - offset_ >= here * N) {
      float *at = tensor() + offset_;
      offset_ += here * N;
      return at;
    }
    here_ = here;
    for (int row = 0; row < here; ++row) {
      skip_empty();
      of_[row] = slot_;
      const int64_t left = slots_.numel[slot_] - offset_;
      at_[row] = tensor() ? tensor() + offset_ : nullptr;
      length_[row] = left < N ? left : N;
      offset_ += N;
    }
    return nullptr;
  }

  // For rows of which `next` said null: copies them out, absent ones and padding as zeros; copies them in; clears their
  // padding.
  void gather(float *rows) const {
    for (int row = 0; row < here_; ++row) {
      const int64_t length = at_[row] ? length_[row] : 0;
      if (length) std::memcpy(rows + row * N, at_[row], size_t(length) * sizeof(float));
      std::memset(rows + row * N + length, 0, size_t(N - length) * sizeof(float));
    }
  }

  void scatter(const float *rows) const {
    for (int row = 0; row < here_; ++row)
      if (at_[row]) std::memcpy(at_[row], rows + row * N, size_t(length_[row]) * sizeof(float));
  }

  void clear_padding(float *rows) const {
    for (int row = 0; row < here_; ++row)
      if (length_[row] < N) std::memset(rows + row * N + length_[row], 0, size_t(N - length_[row]) * sizeof(float));
  }

  // Whose rows `next` returned last: all of them, or one of which it said null.
  int64_t slot() const { return slot_; }
  int64_t slot(int row) const { return of_[row]; }

 private:
  const Slots slots_;
  int64_t slot_ = 0, offset_ = 0, length_[LANES], of_[LANES];
  float *at_[LANES];
  int here_ = 0;

  float *tensor() const { return slots_.tensor ? slots_.tensor[slot_] : nullptr; }

  void skip_empty() {
    while (offset_ >= slots_.numel[slot_]) { ++slot_; offset_ = 0; }
  }
};

}  // namespace
