// y = W x + bias for a packed GBLR matrix: how work is cut into tokens, groups and tiles, and shared by threads.
#include <omp.h>
#include <pthread.h>

#include <cstdlib>
#include <memory>

#include "product.h"
#include "transpose.h"

namespace gblr {
namespace {

constexpr int kFew = 4;                   // up to here weights lie in the lanes
constexpr int64_t kThreadWork = 1 << 15;  // vector multiplications below which a further thread does not pay

bool forked = false;  // threads of a parent do not exist in its child, and OpenMP would wait for them
__attribute__((constructor)) void watch_forks() {
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
}

struct Free {
  void operator()(float* p) const { std::free(p); }
};
using Floats = std::unique_ptr<float, Free>;
Floats floats(int64_t count) {
  return Floats(static_cast<float*>(std::aligned_alloc(64, (std::max<int64_t>(count, 1) * 4 + 63) / 64 * 64)));
}

template <class T>
struct Product {
  const Plan& plan;
  const T *values, *x, *bias;
  T* y;
  int64_t tokens;
  int32_t out, in, lines;
};

// [begin, end) of thread `part` of `parts`, cut where `weight(i)`, which grows with i, passes equal shares.
template <class Weight>
std::pair<int32_t, int32_t> share(int32_t count, int part, int parts, Weight weight) {
  if (parts == 1) return {0, count};
  const auto cut = [&](int p) {
    const int64_t goal = weight(count) * p / parts;
    int32_t low = 0, high = count;
    while (low < high) {
      const int32_t middle = (low + high) / 2;
      if (weight(middle) < goal) low = middle + 1; else high = middle;
    }
    return low;
  };
  return {part == 0 ? 0 : cut(part), part + 1 == parts ? count : cut(part + 1)};
}

std::pair<int32_t, int32_t> own_groups(const Plan& plan, int part, int parts) {
  const Header& head = plan.head;
  return share(head.num_groups, part, parts, [&](int32_t g) -> int64_t {
    return g < head.num_groups ? plan.groups[g].values : head.tile_values;
  });
}

std::pair<int32_t, int32_t> own_tiles(const Plan& plan, int part, int parts) {
  return share(plan.head.num_tiles, part, parts, [&](int32_t t) -> int64_t {
    return int64_t(plan.tiles[t]) * kTile + int64_t(plan.strips[t * kStrips]) * kStrip;
  });
}

template <int C, class T>
void few(const Product<T>& p, int threads) {
  Floats z = floats(int64_t(p.lines) * C), wide;
  const float* x;
  if constexpr (std::is_same_v<T, float>) {
    x = p.x;
  } else {
    wide = floats(int64_t(p.in) * C);
    for (int64_t i = 0; i < int64_t(p.in) * C; i++) wide.get()[i] = widen(p.x[i]);
    x = wide.get();
  }
  const auto columns = [&](int part, int parts) {
    const auto [begin, end] = own_groups(p.plan, part, parts);
    for (int32_t g = begin; g < end; g++) group_lines_few<C>(p.plan.groups[g], p.values, x, p.in, z.get());
  };
  const auto rows = [&](int part, int parts) {
    const auto [begin, end] = own_tiles(p.plan, part, parts);
    for (int32_t t = begin; t < end; t++) tile_outputs_few<C>(p.plan, p.values, z.get(), p.bias, t, p.y);
  };
  if (threads == 1) return columns(0, 1), rows(0, 1);
#pragma omp parallel num_threads(threads)
  {
    const int part = omp_get_thread_num(), parts = omp_get_num_threads();
    columns(part, parts);
#pragma omp barrier
    rows(part, parts);
  }
}

// Q vectors of tokens, from `first` on, through both halves.
template <int N, int Q, class T>
struct Batch {
  static constexpr int kTokens = N * Q;
  static constexpr int kRows = kLanes == 16 || Q == 1 ? kStrip : kStrip / 2;  // outputs at a time: what registers hold

  static void enter(const Product<T>& p, int64_t first, float* x) {
    tokens_to_lanes<N, Q>(p.x + first * p.in, p.tokens - first, p.in, x);
  }
  static void columns(const Product<T>& p, const float* x, float* z, int32_t begin, int32_t end) {
    for (int32_t g = begin; g < end; g++) group_lines<N, Q>(p.plan.groups[g], p.values, x, p.in, z);
  }
  static void rows(const Product<T>& p, const float* z, int64_t first, int32_t begin, int32_t end) {
    alignas(64) float y[kTile * kTokens];
    for (int32_t t = begin; t < end; t++) {
      const int32_t row = t * kTile, count = std::min(kTile, p.out - row);
      for (int32_t r = 0; r < count; r += kRows)
        strip_outputs<N, Q, kRows>(p.plan, p.values, z, p.bias, row + r, y + r * kTokens);
      lanes_to_tokens<N, Q>(y, count, p.tokens - first, p.out, p.y + first * p.out + row);
    }
  }
};

constexpr int kMostVectors = 3;

template <int N, class T, class Do>
void with_batch(int vectors, Do action) {
  if (vectors == 1) action(Batch<N, 1, T>());
  if (vectors == 2) action(Batch<N, 2, T>());
  if (vectors == 3) action(Batch<N, 3, T>());
}

template <int N, class T>
void many(const Product<T>& p, int threads) {
  const int64_t vectors = (p.tokens + N - 1) / N;
  int64_t batches = (vectors + kMostVectors - 1) / kMostVectors;
  const bool alone = threads == 1 || vectors >= threads;  // every thread has batches of its own
  if (alone && batches % threads) batches = std::min(vectors, (batches / threads + 1) * threads);
  const auto first_of = [&](int64_t b) { return vectors * b / batches; };  // in vectors
  const auto width_of = [&](int64_t b) { return int(first_of(b + 1) - first_of(b)); };
  const int64_t most = N * ((vectors + batches - 1) / batches), x_size = p.in * most, z_size = p.lines * most;
  const int64_t rooms = alone ? threads : batches;
  Floats x = floats(x_size * rooms), z = floats(z_size * rooms);
  if (alone) {
    const auto work = [&](int64_t begin, int64_t end, float* x_own, float* z_own) {
      for (int64_t b = begin; b < end; b++)
        with_batch<N, T>(width_of(b), [&](auto batch) {
          batch.enter(p, first_of(b) * N, x_own);
          batch.columns(p, x_own, z_own, 0, p.plan.head.num_groups);
          batch.rows(p, z_own, first_of(b) * N, 0, p.plan.head.num_tiles);
        });
    };
    if (threads == 1) return work(0, batches, x.get(), z.get());
#pragma omp parallel num_threads(threads)
    {
      const int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
      work(batches * part / parts, batches * (part + 1) / parts, x.get() + x_size * part, z.get() + z_size * part);
    }
    return;
  }
  const auto each = [&](auto action) {
    for (int64_t b = 0; b < batches; b++)
      with_batch<N, T>(width_of(b), [&](auto batch) { action(batch, first_of(b) * N, x.get() + x_size * b, z.get() + z_size * b); });
  };
  each([&](auto batch, int64_t first, float* x_own, float*) { batch.enter(p, first, x_own); });
#pragma omp parallel num_threads(threads)
  {
    const int part = omp_get_thread_num(), parts = omp_get_num_threads();
    const auto groups = own_groups(p.plan, part, parts);
    each([&](auto batch, int64_t, float* x_own, float* z_own) { batch.columns(p, x_own, z_own, groups.first, groups.second); });
#pragma omp barrier
    const auto tiles = own_tiles(p.plan, part, parts);
    each([&](auto batch, int64_t first, float*, float* z_own) { batch.rows(p, z_own, first, tiles.first, tiles.second); });
  }
}

template <class T>
void product(const Product<T>& p, int threads) {
  if (!p.tokens || !p.out) return;
  const bool in_lanes = p.tokens > kFew;
  const int64_t steps = in_lanes ? (p.tokens + kLanes - 1) / kLanes : p.tokens;
  const int64_t work = p.plan.head.num_values * steps / (in_lanes ? 1 : kLanes);
  threads = forked ? 1 : int(std::clamp<int64_t>(work / kThreadWork, 1, threads));
  if (p.tokens == 1) few<1>(p, threads);
  else if (p.tokens == 2) few<2>(p, threads);
  else if (p.tokens == 3) few<3>(p, threads);
  else if (p.tokens == 4) few<4>(p, threads);
  else if (kLanes == 8 || p.tokens <= 8) many<8>(p, threads);
  else many<kLanes>(p, threads);
}

template <class T>
void call(const int32_t* data, const void* values, const void* x, const void* bias, void* y, int64_t tokens, int threads) {
  const Plan plan(data);
  product<T>({plan, (const T*)values, (const T*)x, (const T*)bias, (T*)y, tokens, plan.head.out_features,
              plan.head.in_features, plan.head.num_lines}, threads);
}

}  // namespace
}  // namespace gblr

// The same without checks, for a caller that has made them once.
GBLR_API void gblr_bound_matmul(const int32_t* plan, int bytes, const void* values, const void* x, const void* bias, void* y,
                                int64_t tokens, int threads) {
  if (bytes == 4) gblr::call<float>(plan, values, x, bias, y, tokens, threads);
  if (bytes == 2) gblr::call<gblr::BFloat16>(plan, values, x, bias, y, tokens, threads);
}

// x is (tokens, in), y is (tokens, out), both in the dtype of the values; `bias` may be null. Returns 0, or 1 where the plan is
// for other sizes.
GBLR_API int gblr_block_matmul(const int32_t* plan, int bytes, const void* values, const void* x, const void* bias, void* y,
                               int64_t in, int64_t out, int64_t num_values, int64_t tokens, int threads) {
  const gblr::Header& head = gblr::Plan(plan).head;
  if (head.in_features != in || head.out_features != out || head.num_values != num_values) return 1;
  gblr_bound_matmul(plan, bytes, values, x, bias, y, tokens, threads);
  return 0;
}
