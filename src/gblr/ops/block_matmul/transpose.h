// Tokens into lanes and back: N x N tiles by shuffles, edges one by one.
#pragma once
#include "product.h"

namespace gblr {

// Swaps blocks of S x S off the diagonal: lanes with bit S of `a` change places with those without it of `b`.
template <int N, int S>
inline void swap_blocks(Vec<N>& a, Vec<N>& b) {
#ifdef __clang__
  Vec<N> low, high;
  for (int n = 0; n < N; n++) low[n] = n & S ? b[n - S] : a[n], high[n] = n & S ? b[n] : a[n + S];
#else
  typename Lanes<N>::Bits low_from, high_from;
  for (int n = 0; n < N; n++) low_from[n] = n & S ? N + n - S : n, high_from[n] = n & S ? N + n : n + S;
  const Vec<N> low = __builtin_shuffle(a, b, low_from), high = __builtin_shuffle(a, b, high_from);
#endif
  a = low, b = high;
}

template <int N, int S = 1>
inline void transpose(Vec<N> (&rows)[N]) {
  for (int i = 0; i < N; i++)
    if (!(i & S)) swap_blocks<N, S>(rows[i], rows[i + S]);
  if constexpr (2 * S < N) transpose<N, 2 * S>(rows);
}

// Columns of tokens [0, count) of x, which has `length` of them, to lanes: out is [column][N * Q]; lanes without token are 0.
template <int N, int Q, class T>
inline void tokens_to_lanes(const T* x, int64_t count, int32_t length, float* out) {
  constexpr int kTokens = N * Q;
  for (int q = 0; q < Q; q++) {
    const int64_t first = q * N, there = std::clamp<int64_t>(count - first, 0, N);
    int32_t j = 0;
    for (; j + N <= length; j += N) {
      Vec<N> rows[N];
      for (int i = 0; i < N; i++) rows[i] = i < there ? load<N>(x + (first + i) * length + j) : Vec<N>{};
      transpose<N>(rows);
      for (int i = 0; i < N; i++) store<N>(out + int64_t(j + i) * kTokens + first, rows[i]);
    }
    for (; j < length; j++)
      for (int i = 0; i < N; i++)
        out[int64_t(j) * kTokens + first + i] = i < there ? widen(x[(first + i) * length + j]) : 0.0f;
  }
}

// The way back for `rows` outputs held as [output][N * Q]: to y of tokens [0, count), each `length` apart.
template <int N, int Q, class T>
inline void lanes_to_tokens(const float* in, int32_t rows, int64_t count, int32_t length, T* y) {
  constexpr int kTokens = N * Q;
  for (int q = 0; q < Q; q++) {
    const int64_t first = q * N, there = std::clamp<int64_t>(count - first, 0, N);
    int32_t r = 0;
    for (; r + N <= rows; r += N) {
      Vec<N> tile[N];
      for (int i = 0; i < N; i++) tile[i] = load<N>(in + (r + i) * kTokens + first);
      transpose<N>(tile);
      for (int i = 0; i < there; i++) store<N>(y + (first + i) * length + r, tile[i]);
    }
    for (; r < rows; r++)
      for (int i = 0; i < there; i++) narrow(in[r * kTokens + first + i], y + (first + i) * length + r);
  }
}

}  // namespace gblr
