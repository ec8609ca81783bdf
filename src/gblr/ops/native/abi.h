// What every file of the CPU kernels shares: the export macro, vectors of lanes, loads and stores.
#pragma once
#include <cstdint>
#include <cstring>

#define GBLR_API extern "C" __attribute__((visibility("default")))

#ifndef GBLR_LANES
#define GBLR_LANES 8  // float32 per vector register: 16 for AVX-512, 8 for AVX2
#endif

namespace gblr {

constexpr int kLanes = GBLR_LANES;

template <int N>
using Vec = float __attribute__((vector_size(4 * N), aligned(4), may_alias));

template <int N>
inline Vec<N> load(const float* p) { return *reinterpret_cast<const Vec<N>*>(p); }

template <int N>
inline void store(float* p, Vec<N> v) { *reinterpret_cast<Vec<N>*>(p) = v; }

template <int N>
inline Vec<N> splat(float f) { return Vec<N>{} + f; }

}  // namespace gblr
