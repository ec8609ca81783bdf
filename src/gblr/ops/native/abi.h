// What every file of the CPU kernels shares: the export macro, vectors of lanes, loads and stores.
#pragma once
#include <cstdint>
#include <cstring>

#define GBLR_API extern "C" __attribute__((visibility("default")))

#ifndef GBLR_LANES
#define GBLR_LANES 8  // float32 per vector register: 16 for AVX-512, 8 for AVX2
#endif

// Before a loop over a small array of sums: unrolled early, the array lives in registers.
#define GBLR_UNROLL _Pragma("GCC unroll 16")
#define GBLR_HOT __attribute__((noinline))

namespace gblr {

constexpr int kLanes = GBLR_LANES;

// N lanes, loaded from and stored to any address. An alias template with these attributes would be a plain float: GCC 12 drops
// attributes that depend on a template's argument, but not in a typedef inside a class.
template <int N>
struct Lanes {
  typedef float Float __attribute__((vector_size(4 * N), aligned(4), may_alias));
  typedef uint32_t Bits __attribute__((vector_size(4 * N), aligned(4), may_alias));
  typedef uint16_t HalfBits __attribute__((vector_size(2 * N), aligned(2), may_alias));
};

template <int N>
using Vec = typename Lanes<N>::Float;

static_assert(sizeof(Vec<kLanes>) == 4 * kLanes && alignof(Vec<kLanes>) == 4);

template <int N>
inline Vec<N> load(const float* p) { return *reinterpret_cast<const Vec<N>*>(p); }

template <int N>
inline void store(float* p, Vec<N> v) { *reinterpret_cast<Vec<N>*>(p) = v; }

template <int N>
inline Vec<N> splat(float f) { return f - Vec<N>{}; }  // f + 0 would be an addition: it turns -0 into 0

// The sum of the lanes, halves first: its order is fixed.
template <int N>
inline float sum(Vec<N> v) {
  if constexpr (N == 1) {
    return v[0];
  } else {
    float lanes[N];  // a copy: taking the halves from `v` itself made GCC keep what is summed in memory, loops before it too
    store<N>(lanes, v);
    return sum<N / 2>(load<N / 2>(lanes) + load<N / 2>(lanes + N / 2));
  }
}

// bfloat16 is the upper half of a float32: widened when loaded, rounded to nearest even when stored, as torch does.
struct BFloat16 {
  uint16_t bits;
};

template <int N>
inline Vec<N> load(const BFloat16* p) {
  using Bits = typename Lanes<N>::Bits;
  const auto upper = *reinterpret_cast<const typename Lanes<N>::HalfBits*>(p);
  return (Vec<N>)(__builtin_convertvector(upper, Bits) << 16);
}

template <int N>
inline void store(BFloat16* p, Vec<N> v) {
  using Bits = typename Lanes<N>::Bits;
  using HalfBits = typename Lanes<N>::HalfBits;
  const Bits bits = (Bits)v;
  const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Bits is_nan = (Bits)(v != v);  // all ones where it is; rounding could carry a NaN into infinity
  *reinterpret_cast<HalfBits*>(p) = __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), HalfBits);
}

}  // namespace gblr
