// Forward and backward of mask * content on a CPU, for whole widths and locations; reference.py is the definition.
//
// A mask is the difference of two runs of the table (gblr/ops/step.py), made anew where it is needed: content and gradient are
// read once, and nothing but the results is written. One thread makes all sums of a block, so that any number of threads gives
// the same bits.
#include <algorithm>
#include <cmath>

#include "../native/abi.h"

namespace {

using namespace gblr;

// What the kernels read besides content and gradient.
struct Masks {
  const float *width, *location, *table;
  int64_t blocks, block_rank, length;
  int threads;

  // Waking a thread costs about as long as it takes one to do this many elements (measured: docs/dev/kernels.md).
  static constexpr int64_t kWorthThread = 1 << 14;

  int num_threads() const {
    return static_cast<int>(std::clamp<int64_t>(blocks * block_rank * length / kWorthThread, 1, threads));
  }
  bool is_full(int64_t k) const { return width[k] >= static_cast<float>(length); }
};

// Runs of the table for one block: S at its rise (shifted by l) and at its fall (by l + w), and the slope S' at both.
struct Runs {
  const float *rise = nullptr, *fall = nullptr, *slope_rise = nullptr, *slope_fall = nullptr;
  bool valid = false;  // not for NaN, nor for a width beyond the axis: they would lead out of the table

  Runs(const Masks& masks, int64_t k) {
    const float n = static_cast<float>(masks.length), width = masks.width[k];
    float location = masks.location[k];
    if (!(0 <= location && location < n)) {
      location = std::fmod(location, n);
      if (location < 0) location += n;
    }
    valid = 0 <= width && width <= n && 0 <= location && location <= n;
    if (!valid) return;
    rise = masks.table + 2 * masks.length - static_cast<int64_t>(location);
    fall = rise - static_cast<int64_t>(width);
    slope_rise = rise + 3 * masks.length;
    slope_fall = fall + 3 * masks.length;
  }

  template <int N>
  Vec<N> mask(int64_t j) const { return load<N>(rise + j) - load<N>(fall + j); }
};

// Asks for memory ahead of its use, into the next row too. Beyond the caches a backward takes a quarter less time for it;
// 128 to 512 elements were tried at 768 x 3072.
template <class T>
inline void fetch_ahead(const T* p) { __builtin_prefetch(p + 512); }

template <class T>
void forward_row(const T* content, const Runs& runs, T* out, int64_t length) {
  int64_t j = 0;
  for (; j + kLanes <= length; j += kLanes) {
    fetch_ahead(content + j);
    store<kLanes>(out + j, load<kLanes>(content + j) * runs.mask<kLanes>(j));
  }
  for (; j < length; j++) store<1>(out + j, load<1>(content + j) * runs.mask<1>(j));
}

// Returns whether all blocks were valid.
template <class T>
int forward(const T* content, const Masks& masks, T* out) {
  int valid = 1;
#pragma omp parallel for num_threads(masks.num_threads()) schedule(static) reduction(& : valid)
  for (int64_t k = 0; k < masks.blocks; k++) {
    const Runs runs(masks, k);
    valid &= runs.valid;
    for (int64_t r = 0; runs.valid && r < masks.block_rank; r++) {
      const int64_t row = (k * masks.block_rank + r) * masks.length;
      forward_row(content + row, runs, out + row, masks.length);
    }
  }
  return valid;
}

// Sums of grad * content * slope for the slopes at both ends: by lane, and for a whole block.
template <int N>
struct LaneSums {
  Vec<N> at_rise{}, at_fall{};
};

struct Sums {
  float at_rise = 0, at_fall = 0;
};

template <bool kContent, int N, class T>
inline void backward_at(int64_t j, const T* grad, const T* content, const Runs& runs, T* grad_content, LaneSums<N>& sums) {
  const Vec<N> g = load<N>(grad + j), upstream = g * load<N>(content + j);
  if (kContent) store<N>(grad_content + j, g * runs.mask<N>(j));
  sums.at_rise += upstream * load<N>(runs.slope_rise + j);
  sums.at_fall += upstream * load<N>(runs.slope_fall + j);
}

template <bool kContent, class T>
void backward_row(const T* grad, const T* content, const Runs& runs, T* grad_content, Sums& sums, int64_t length) {
  LaneSums<kLanes> body;
  LaneSums<1> tail;
  int64_t j = 0;
  for (; j + kLanes <= length; j += kLanes) {
    fetch_ahead(grad + j);
    fetch_ahead(content + j);
    backward_at<kContent>(j, grad, content, runs, grad_content, body);
  }
  for (; j < length; j++) backward_at<kContent>(j, grad, content, runs, grad_content, tail);
  sums.at_rise += sum<kLanes>(body.at_rise) + sum<1>(tail.at_rise);
  sums.at_fall += sum<kLanes>(body.at_fall) + sum<1>(tail.at_fall);
}

template <bool kContent, class T>
int backward(const T* grad, const T* content, const Masks& masks, T* grad_content, float* grad_width, float* grad_location) {
  int valid = 1;
#pragma omp parallel for num_threads(masks.num_threads()) schedule(static) reduction(& : valid)
  for (int64_t k = 0; k < masks.blocks; k++) {
    const Runs runs(masks, k);
    valid &= runs.valid;
    Sums sums;
    for (int64_t r = 0; runs.valid && r < masks.block_rank; r++) {
      const int64_t row = (k * masks.block_rank + r) * masks.length;
      backward_row<kContent>(grad + row, content + row, runs, kContent ? grad_content + row : nullptr, sums, masks.length);
    }
    grad_width[k] = sums.at_fall;
    grad_location[k] = masks.is_full(k) ? 0.0f : sums.at_fall - sums.at_rise;  // their difference would be rounding alone
  }
  return valid;
}

// `grad_content` may be null: the content is frozen then.
template <class T>
int backward(const void* grad, const void* content, const Masks& masks, void* grad_content, float* grad_width,
             float* grad_location) {
  const auto run = grad_content ? backward<true, T> : backward<false, T>;
  return run(static_cast<const T*>(grad), static_cast<const T*>(content), masks, static_cast<T*>(grad_content), grad_width,
             grad_location);
}

}  // namespace

// Both return 0 if a width or a location was invalid, else 1. Contents are float32 or, if `bf16`, bfloat16.

GBLR_API int gblr_masked_content_forward(int bf16, const void* content, const float* width, const float* location,
                                         const float* table, void* out, int64_t blocks, int64_t block_rank, int64_t length,
                                         int threads) {
  const Masks masks{width, location, table, blocks, block_rank, length, threads};
  if (bf16) return forward(static_cast<const BFloat16*>(content), masks, static_cast<BFloat16*>(out));
  return forward(static_cast<const float*>(content), masks, static_cast<float*>(out));
}

GBLR_API int gblr_masked_content_backward(int bf16, const void* grad, const void* content, const float* width,
                                          const float* location, const float* table, void* grad_content, float* grad_width,
                                          float* grad_location, int64_t blocks, int64_t block_rank, int64_t length, int threads) {
  const Masks masks{width, location, table, blocks, block_rank, length, threads};
  const auto run = bf16 ? backward<BFloat16> : backward<float>;
  return run(grad, content, masks, grad_content, grad_width, grad_location);
}
