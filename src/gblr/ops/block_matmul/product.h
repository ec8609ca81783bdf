// The two halves of a product, z = V x and y = U z + bias, for one group of lines or one tile of outputs at a time.
//
// Many tokens: tokens lie in the lanes of vectors, so x, z and y are [column][token]; a weight is splat over the lanes.
// Few tokens: weights lie in the lanes, and every weight is read once for all tokens.
#pragma once
#include <immintrin.h>

#include <algorithm>

#include "../native/abi.h"
#include "plan.h"

namespace gblr {

inline float widen(float value) { return value; }
inline float widen(BFloat16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}
inline void narrow(float value, float* out) { *out = value; }
inline void narrow(float value, BFloat16* out) { store<1>(out, Vec<1>{value}); }

// N weights as float32 in memory, where they can be splat from: in place, or widened into `room`.
template <int N>
inline const float* as_floats(const float* p, float*) { return p; }
template <int N>
inline const float* as_floats(const BFloat16* p, float* room) {
  store<N>(room, load<N>(p));
  return room;
}

// Calls body(first column, count) for the one or two straight runs of a cyclic span.
template <class Body>
inline void runs(Span span, int32_t length, Body body) {
  const int32_t first = std::min(span.length, length - span.start);
  if (first > 0) body(span.start, first);
  if (span.length > first) body(0, span.length - first);
}

// ---- many tokens: N lanes, Q vectors of them

// The sums below are local arrays in loops that are unrolled early (GBLR_UNROLL): only then does GCC keep them in registers. What
// is called per group or strip is not inlined, since that changed with its surroundings, at half the speed.

// All four lines over `count` columns of their core.
template <int N, int Q, class T>
inline void add_core(const T* w, const float* x, int32_t count, Vec<N> (&total)[kGroup][Q]) {
  constexpr int kParts = Q == 1 ? 2 : 1;  // independent sums hide the latency of an addition
  Vec<N> sum[kParts][kGroup][Q] = {};
  const auto column = [&](Vec<N> (&own)[kGroup][Q]) {
    alignas(16) float room[kGroup];
    const float* weight = as_floats<kGroup>(w, room);
    Vec<N> in[Q];
    GBLR_UNROLL
    for (int q = 0; q < Q; q++) in[q] = load<N>(x + N * q);
    GBLR_UNROLL
    for (int i = 0; i < kGroup; i++)
      GBLR_UNROLL
      for (int q = 0; q < Q; q++) own[i][q] += splat<N>(weight[i]) * in[q];
    x += N * Q, w += kGroup;
  };
  int32_t j = 0;
  for (; j + kParts <= count; j += kParts)
    GBLR_UNROLL
    for (int part = 0; part < kParts; part++) column(sum[part]);
  for (; j < count; j++) column(sum[0]);
  GBLR_UNROLL
  for (int part = 0; part < kParts; part++)
    GBLR_UNROLL
    for (int i = 0; i < kGroup; i++)
      GBLR_UNROLL
      for (int q = 0; q < Q; q++) total[i][q] += sum[part][i][q];
}

// One line over `count` columns.
template <int N, int Q, class T>
inline void add_line(const T* w, const float* x, int32_t count, Vec<N> (&total)[Q]) {
  Vec<N> sum[Q] = {};
  for (int32_t j = 0; j < count; j++, x += N * Q)
    GBLR_UNROLL
    for (int q = 0; q < Q; q++) sum[q] += splat<N>(widen(w[j])) * load<N>(x + N * q);
  GBLR_UNROLL
  for (int q = 0; q < Q; q++) total[q] += sum[q];
}

template <int N, int Q, class T>
GBLR_HOT void group_lines(const Group& group, const T* values, const float* x, int32_t length, float* z) {
  constexpr int kTokens = N * Q;
  Vec<N> total[kGroup][Q] = {};
  const T* w = values + group.values;
  runs(group.core, length, [&](int32_t column, int32_t count) {
    add_core<N, Q>(w, x + int64_t(column) * kTokens, count, total);
    w += count * kGroup;
  });
  GBLR_UNROLL
  for (int i = 0; i < kGroup; i++) {
    const auto outside = [&](int32_t column, int32_t count) {
      add_line<N, Q>(w, x + int64_t(column) * kTokens, count, total[i]);
      w += count;
    };
    runs(group.head[i], length, outside);
    runs(group.tail[i], length, outside);
    if (group.line[i] < 0) continue;
    GBLR_UNROLL
    for (int q = 0; q < Q; q++) store<N>(z + int64_t(group.line[i]) * kTokens + N * q, total[i][q]);
  }
}

// R outputs from `row` on (a multiple of R, within one strip).
template <int N, int Q, int R, class T>
GBLR_HOT void strip_outputs(const Plan& plan, const T* values, const float* z, const T* bias, int32_t row, float* y) {
  constexpr int kTokens = N * Q;
  const Header& head = plan.head;
  Vec<N> sum[R][Q];
  GBLR_UNROLL
  for (int r = 0; r < R; r++)
    GBLR_UNROLL
    for (int q = 0; q < Q; q++) sum[r][q] = splat<N>(bias && row + r < head.out_features ? widen(bias[row + r]) : 0.0f);
  const auto add = [&](const T* w, int32_t line) {
    alignas(32) float room[R];
    const float* weight = as_floats<R>(w, room);
    const float* at = z + int64_t(line) * kTokens;
    Vec<N> in[Q];
    GBLR_UNROLL
    for (int q = 0; q < Q; q++) in[q] = load<N>(at + N * q);
    GBLR_UNROLL
    for (int r = 0; r < R; r++)
      GBLR_UNROLL
      for (int q = 0; q < Q; q++) sum[r][q] += splat<N>(weight[r]) * in[q];
  };
  const int32_t tile = row / kTile, strip = row / kStrip;
  const T* w = values + head.tile_values + int64_t(plan.tiles[tile]) * kTile + row % kTile;
  for (int32_t c = plan.tiles[tile]; c < plan.tiles[tile + 1]; c++, w += kTile) add(w, plan.tile_lines[c]);
  w = values + head.strip_values + int64_t(plan.strips[strip]) * kStrip + row % kStrip;
  for (int32_t c = plan.strips[strip]; c < plan.strips[strip + 1]; c++, w += kStrip) add(w, plan.strip_lines[c]);
  GBLR_UNROLL
  for (int r = 0; r < R; r++)
    GBLR_UNROLL
    for (int q = 0; q < Q; q++) store<N>(y + r * kTokens + N * q, sum[r][q]);
}

// ---- few tokens: C of them; x is [token][column], z is [line][token]

// repeat: columns of x, each four times, for the four lines of a group. fold: sums lanes that belong to the same line.
#if defined(__AVX512F__)
constexpr int kColumns = 4;
inline Vec<16> repeat(const float* x) {
  const __m512i each = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  return (Vec<16>)_mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(x)), each);
}
inline Vec<8> halves(Vec<16> v) {
  return (Vec<8>)_mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
}
#else
constexpr int kColumns = 2;
inline Vec<8> repeat(const float* x) {
  double pair;
  std::memcpy(&pair, x, 8);
  const __m256i each = _mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0);
  return (Vec<8>)_mm256_permutevar_ps(_mm256_castpd_ps(_mm256_set1_pd(pair)), each);
}
inline Vec<8> halves(Vec<8> v) { return v; }
#endif
inline Vec<kGroup> fold(Vec<kLanes> lanes) {
  const __m256 v = (__m256)halves(lanes);
  return (Vec<kGroup>)_mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
}

constexpr int kAhead = 256;  // weights asked for before their turn; the processor looks ahead less far at the start of a group

// `count` columns of a core; x is that of the first token, the others lie `length` apart.
template <int C, class T>
inline void add_core_few(const T* w, const float* x, int32_t count, int32_t length, float (&total)[C][kGroup]) {
  constexpr int N = kLanes;
  constexpr int kParts = C == 1 ? 4 : 2;
  Vec<N> sum[kParts][C] = {};
  const auto columns = [&](Vec<N> (&own)[C]) {
    __builtin_prefetch(w + kAhead);
    const Vec<N> weight = load<N>(w);
    GBLR_UNROLL
    for (int c = 0; c < C; c++) own[c] += weight * repeat(x + int64_t(c) * length);
    x += kColumns, w += N;
  };
  int32_t j = 0;
  for (; j + kParts * kColumns <= count; j += kParts * kColumns)
    GBLR_UNROLL
    for (int part = 0; part < kParts; part++) columns(sum[part]);
  for (; j + kColumns <= count; j += kColumns) columns(sum[0]);
  GBLR_UNROLL
  for (int c = 0; c < C; c++) {
    GBLR_UNROLL
    for (int part = 1; part < kParts; part++) sum[0][c] += sum[part][c];
    Vec<kGroup> lines = load<kGroup>(total[c]) + fold(sum[0][c]);
    for (int32_t k = 0; k < count - j; k++) lines += load<kGroup>(w + k * kGroup) * splat<kGroup>(x[int64_t(c) * length + k]);
    store<kGroup>(total[c], lines);
  }
}

template <int C, class T>
inline void add_line_few(const T* w, const float* x, int32_t count, int32_t length, float (&total)[C][kGroup], int line) {
  constexpr int N = kLanes;
  Vec<N> sum[C] = {};
  int32_t j = 0;
  for (; j + N <= count; j += N) {
    const Vec<N> weight = load<N>(w + j);
    GBLR_UNROLL
    for (int c = 0; c < C; c++) sum[c] += weight * load<N>(x + int64_t(c) * length + j);
  }
  GBLR_UNROLL
  for (int c = 0; c < C; c++) {
    float rest = gblr::sum<N>(sum[c]);
    for (int32_t k = j; k < count; k++) rest += widen(w[k]) * x[int64_t(c) * length + k];
    total[c][line] += rest;
  }
}

template <int C, class T>
GBLR_HOT void group_lines_few(const Group& group, const T* values, const float* x, int32_t length, float* z) {
  float total[C][kGroup] = {};
  const T* w = values + group.values;
  runs(group.core, length, [&](int32_t column, int32_t count) {
    add_core_few<C>(w, x + column, count, length, total);
    w += count * kGroup;
  });
  GBLR_UNROLL
  for (int i = 0; i < kGroup; i++) {
    const auto outside = [&](int32_t column, int32_t count) {
      add_line_few<C>(w, x + column, count, length, total, i);
      w += count;
    };
    if (group.head[i].length) runs(group.head[i], length, outside);
    if (group.tail[i].length) runs(group.tail[i], length, outside);
    for (int c = 0; c < C && group.line[i] >= 0; c++) z[int64_t(group.line[i]) * C + c] = total[c][i];
  }
}

template <int C, class T>
GBLR_HOT void tile_outputs_few(const Plan& plan, const T* values, const float* z, const T* bias, int32_t tile, T* y) {
  constexpr int N = kLanes;
  constexpr int kVectors = N == 16 || C == 1 ? kTile / N : (C == 2 ? 4 : 2);  // of outputs at a time: what registers hold
  constexpr int kParts = C == 1 ? 4 : 2;
  const Header& head = plan.head;
  float out[C][kTile];
  const T* whole = values + head.tile_values;
  for (int first = 0; first < kTile; first += kVectors * N) {
    Vec<N> sum[C][kVectors] = {};
    for (int32_t c = plan.tiles[tile]; c < plan.tiles[tile + 1]; c++) {
      const T* w = whole + int64_t(c) * kTile + first;
      const float* in = z + int64_t(plan.tile_lines[c]) * C;
      GBLR_UNROLL
      for (int v = 0; v < kVectors; v++) {
        const Vec<N> weight = load<N>(w + N * v);
        GBLR_UNROLL
        for (int t = 0; t < C; t++) sum[t][v] += splat<N>(in[t]) * weight;
      }
    }
    GBLR_UNROLL
    for (int t = 0; t < C; t++)
      GBLR_UNROLL
      for (int v = 0; v < kVectors; v++) store<N>(out[t] + first + N * v, sum[t][v]);
  }
  for (int s = 0; s < kStrips; s++) {
    const int32_t strip = tile * kStrips + s;
    Vec<kStrip> part[kParts][C] = {};
    const T* w = values + head.strip_values + int64_t(plan.strips[strip]) * kStrip;
    const auto add = [&](int32_t c, Vec<kStrip> (&sum)[C]) {
      const Vec<kStrip> weight = load<kStrip>(w);
      const float* in = z + int64_t(plan.strip_lines[c]) * C;
      GBLR_UNROLL
      for (int t = 0; t < C; t++) sum[t] += splat<kStrip>(in[t]) * weight;
      w += kStrip;
    };
    int32_t c = plan.strips[strip];
    for (; c + kParts <= plan.strips[strip + 1]; c += kParts)
      GBLR_UNROLL
      for (int p = 0; p < kParts; p++) add(c + p, part[p]);
    for (; c < plan.strips[strip + 1]; c++) add(c, part[0]);
    GBLR_UNROLL
    for (int t = 0; t < C; t++) {
      Vec<kStrip> sum = load<kStrip>(out[t] + s * kStrip);
      GBLR_UNROLL
      for (int p = 0; p < kParts; p++) sum += part[p][t];
      store<kStrip>(out[t] + s * kStrip, sum);
    }
  }
  const int32_t row = tile * kTile, count = std::min(kTile, head.out_features - row);
  GBLR_UNROLL
  for (int t = 0; t < C; t++)
    for (int32_t r = 0; r < count; r++)
      narrow(out[t][r] + (bias ? widen(bias[row + r]) : 0.0f), y + int64_t(t) * head.out_features + row + r);
}

}  // namespace gblr
