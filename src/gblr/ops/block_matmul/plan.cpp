// Packing, once per matrix: which lines share a group, which tiles they touch, and the way of values between the layouts.
#include "plan.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <type_traits>
#include <vector>

#include "../native/abi.h"

namespace gblr {
namespace {

constexpr int kSearch = 256;       // free lines looked at for a partner, in order of their starts
constexpr int kOutsideCost = 16;   // columns' worth of work that a head or a tail costs beside its own
constexpr int kAlign = 16;         // groups begin at multiples of a cache line

struct Line {
  int32_t start, width;
};

int32_t cyclic(int32_t position, int32_t length) {
  position %= length;
  return position < 0 ? position + length : position;
}

// Signed way from a to b, the short way around.
int32_t way(int32_t a, int32_t b, int32_t length) {
  const int32_t forward = cyclic(b - a, length);
  return forward > length / 2 ? forward - length : forward;
}

std::vector<Line> column_lines(const Block* blocks, int32_t num_blocks, int32_t rank, int32_t length) {
  std::vector<Line> lines;
  lines.reserve(size_t(num_blocks) * rank);
  for (int32_t k = 0; k < num_blocks; k++) {
    const bool full = blocks[k].col_width >= length;  // a full line may begin anywhere: all at 0
    lines.insert(lines.end(), rank, {full ? 0 : cyclic(blocks[k].col_location, length), blocks[k].col_width});
  }
  return lines;
}

// Lines with near starts and ends, four at a time: the first free one, then the three that differ least from it.
std::vector<std::vector<int32_t>> choose_groups(const std::vector<Line>& lines, int32_t length) {
  std::vector<int32_t> order(lines.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return lines[a].start != lines[b].start ? lines[a].start < lines[b].start : lines[a].width < lines[b].width;
  });
  std::vector<std::vector<int32_t>> groups;
  while (!order.empty()) {
    const Line first = lines[order[0]];
    const int32_t window = std::min<int32_t>(kSearch, int32_t(order.size()));
    std::vector<std::pair<int32_t, int32_t>> near;  // difference, place in the order
    for (int32_t i = 1; i < window; i++) {
      const Line other = lines[order[i]];
      const int32_t at_start = way(first.start, other.start, length);
      near.push_back({std::abs(at_start) + std::abs(at_start + other.width - first.width), i});
    }
    const size_t partners = std::min<size_t>(kGroup - 1, near.size());
    std::partial_sort(near.begin(), near.begin() + partners, near.end());
    std::vector<int32_t> places = {0};
    for (size_t i = 0; i < partners; i++) places.push_back(near[i].second);
    std::sort(places.begin(), places.end());
    std::vector<int32_t> members;
    for (int32_t place : places) members.push_back(order[place]);
    for (size_t i = places.size(); i-- > 0;) order.erase(order.begin() + places[i]);
    groups.push_back(members);
  }
  return groups;
}

// The cheapest boundary for a core among the members' own: reading the core costs 4 lines per column, the rest one.
int32_t cheapest(const std::vector<int32_t>& edges, bool at_start) {
  int32_t best = edges[0];
  int64_t least = INT64_MAX;
  for (int32_t candidate : edges) {
    int64_t cost = 0;
    for (int32_t edge : edges) {
      const int32_t outside = at_start ? candidate - edge : edge - candidate;
      cost += outside > 0 ? outside + kOutsideCost : -outside;  // stored alone, or zeros inside of the core
    }
    if (cost < least) least = cost, best = candidate;
  }
  return best;
}

int32_t overlap(int32_t a, int32_t b, int32_t c, int32_t d) { return std::max(0, std::min(b, d) - std::max(a, c)); }

Group make_group(const std::vector<int32_t>& members, const std::vector<Line>& lines, int32_t length, int32_t& values) {
  Group group = {};
  std::vector<int32_t> starts, ends;  // relative to the first member's start
  const Line first = lines[members[0]];
  for (int32_t line : members) {
    starts.push_back(way(first.start, lines[line].start, length));
    ends.push_back(starts.back() + lines[line].width);
  }
  int32_t a = cheapest(starts, true), b = cheapest(ends, false);
  b = std::min(b, a + length);
  b = a + std::max(0, b - a) / 4 * 4;  // batch 1 reads four columns of a core at a time
  int64_t inside = 0;
  for (size_t i = 0; i < members.size(); i++) inside += overlap(a, b, starts[i], ends[i]);
  if (members.size() < kGroup || 2 * inside < int64_t(kGroup) * (b - a)) b = a;  // no core of too few lines, or of zeros for the most part
  group.core = {cyclic(first.start + a, length), b - a};
  values = (values + kAlign - 1) / kAlign * kAlign;
  group.values = values;
  values += kGroup * (b - a);
  for (int i = 0; i < kGroup; i++) {
    group.line[i] = i < int(members.size()) ? members[i] : -1;
    if (group.line[i] < 0) continue;
    const int32_t head_end = std::clamp(a, starts[i], ends[i]), tail_start = std::clamp(b, head_end, ends[i]);
    group.head[i] = {cyclic(first.start + starts[i], length), head_end - starts[i]};
    group.tail[i] = {cyclic(first.start + tail_start, length), ends[i] - tail_start};
    group.begin[i] = head_end - a, group.end[i] = tail_start - a;
    values += group.head[i].length + group.tail[i].length;
  }
  return group;
}

// How many of the outputs [begin, end) lie in the cyclic interval.
int32_t covered(int32_t location, int32_t width, int32_t length, int32_t begin, int32_t end) {
  end = std::min(end, length);
  const int32_t stop = location + width;
  return overlap(location, std::min(stop, length), begin, end) + overlap(0, std::max(0, stop - length), begin, end);
}

struct Rows {
  std::vector<int32_t> tiles = {0}, tile_lines, strips = {0}, strip_lines;
};

Rows row_lists(const Block* blocks, int32_t num_blocks, int32_t rank, int32_t length) {
  Rows rows;
  for (int32_t begin = 0; begin < length; begin += kTile) {
    std::vector<int32_t> parts;
    for (int32_t k = 0; k < num_blocks; k++) {
      const int32_t location = cyclic(blocks[k].row_location, length), width = blocks[k].row_width;
      const int32_t inside = covered(location, width, length, begin, begin + kTile);
      if (inside == std::min(kTile, length - begin)) {
        for (int32_t r = 0; r < rank; r++) rows.tile_lines.push_back(k * rank + r);
      } else if (inside > 0) {
        parts.push_back(k);
      }
    }
    rows.tiles.push_back(int32_t(rows.tile_lines.size()));
    for (int32_t strip = begin; strip < begin + kTile; strip += kStrip) {
      for (int32_t k : parts) {
        const int32_t location = cyclic(blocks[k].row_location, length);
        if (strip >= length || !covered(location, blocks[k].row_width, length, strip, strip + kStrip)) continue;
        for (int32_t r = 0; r < rank; r++) rows.strip_lines.push_back(k * rank + r);
      }
      rows.strips.push_back(int32_t(rows.strip_lines.size()));
    }
  }
  return rows;
}

template <class T>
int32_t append(std::vector<int32_t>& data, const std::vector<T>& items) {
  const int32_t place = int32_t(data.size());
  const int32_t* raw = reinterpret_cast<const int32_t*>(items.data());
  data.insert(data.end(), raw, raw + items.size() * sizeof(T) / sizeof(int32_t));
  return place;
}

// Calls visit(place among the values, is it of u, line, output or column) for every number that is no padding.
template <class Visit>
void walk(const Plan& plan, Visit visit) {
  const Header& head = plan.head;
  for (int32_t g = 0; g < head.num_groups; g++) {
    const Group& group = plan.groups[g];
    int64_t at = group.values;
    for (int32_t j = 0; j < group.core.length; j++) {
      const int32_t column = cyclic(group.core.start + j, head.in_features);
      for (int i = 0; i < kGroup; i++, at++) {
        if (j >= group.begin[i] && j < group.end[i]) visit(at, false, group.line[i], column);
      }
    }
    for (int i = 0; i < kGroup; i++) {
      for (const Span& span : {group.head[i], group.tail[i]}) {
        for (int32_t j = 0; j < span.length; j++)
          visit(at++, false, group.line[i], cyclic(span.start + j, head.in_features));
      }
    }
  }
  const auto outputs = [&](int64_t at, int64_t line, int32_t begin, int32_t count) {
    const Block& block = plan.blocks[line / head.block_rank];
    for (int32_t row = begin; row < std::min(begin + count, head.out_features); row++, at++) {
      if (cyclic(row - block.row_location, head.out_features) < block.row_width) visit(at, true, line, row);
    }
  };
  for (int32_t t = 0; t < head.num_tiles; t++) {
    for (int32_t c = plan.tiles[t]; c < plan.tiles[t + 1]; c++)
      outputs(head.tile_values + int64_t(c) * kTile, plan.tile_lines[c], t * kTile, kTile);
    for (int32_t s = t * kStrips; s < (t + 1) * kStrips; s++) {
      for (int32_t c = plan.strips[s]; c < plan.strips[s + 1]; c++)
        outputs(head.strip_values + int64_t(c) * kStrip, plan.strip_lines[c], s * kStrip, kStrip);
    }
  }
}

// The place of a number in the cropped contents, block by block and line by line.
int64_t cropped(const Plan& plan, bool of_u, int64_t line, int32_t position) {
  const Block& block = plan.blocks[line / plan.head.block_rank];
  const int64_t within = line % plan.head.block_rank;
  if (of_u) return block.u + within * block.row_width + cyclic(position - block.row_location, plan.head.out_features);
  return block.v + within * block.col_width + cyclic(position - block.col_location, plan.head.in_features);
}

// Where a number lies outside of the plan: in the cropped contents, or in the factors, (lines, out) and (lines, in), with zeros.
struct Cropped {
  static int64_t place(const Plan& plan, bool of_u, int64_t line, int32_t position) { return cropped(plan, of_u, line, position); }
};
struct Spread {
  static int64_t place(const Plan& plan, bool of_u, int64_t line, int32_t position) {
    return line * (of_u ? plan.head.out_features : plan.head.in_features) + position;
  }
};

template <class Layout, class T>
void gather(const Plan& plan, const T* u, const T* v, T* values) {
  std::fill_n(values, plan.head.num_values, T(0));
  walk(plan, [&](int64_t at, bool of_u, int64_t line, int32_t position) {
    values[at] = (of_u ? u : v)[Layout::place(plan, of_u, line, position)];
  });
}

template <class Layout, class T>
void scatter(const Plan& plan, const T* values, T* u, T* v) {
  walk(plan, [&](int64_t at, bool of_u, int64_t line, int32_t position) {
    (of_u ? u : v)[Layout::place(plan, of_u, line, position)] = values[at];
  });
}

bool fits(const Header& head, bool spread, int64_t num_u, int64_t num_v, int64_t num_values) {
  const int64_t lines = head.num_lines;
  const int64_t u = spread ? lines * head.out_features : head.num_u, v = spread ? lines * head.in_features : head.num_v;
  return num_u == u && num_v == v && num_values == head.num_values;
}

}  // namespace
}  // namespace gblr

using namespace gblr;

// `structure` is (num_blocks, 4): row width, row location, column width, column location. Returns a handle for `gblr_plan_take`
// and writes the number of int32 that the plan has; 0 where the matrix is too large for indices of 32 bits.
GBLR_API void* gblr_plan_make(int32_t out, int32_t in, int32_t num_blocks, int32_t rank, const int32_t* structure, int64_t* size) {
  std::vector<Block> blocks(num_blocks);
  int64_t u = 0, v = 0;
  for (int32_t k = 0; k < num_blocks; k++) {
    const int32_t* s = structure + 4 * k;
    blocks[k] = {s[0], s[1], s[2], s[3], int32_t(u), int32_t(v)};
    u += int64_t(s[0]) * rank, v += int64_t(s[2]) * rank;
  }
  *size = 0;
  if (2 * (u + v) + 4 * int64_t(kTile) * num_blocks * rank > INT32_MAX) return nullptr;
  Header head = {out, in, num_blocks, rank, num_blocks * rank};
  int32_t values = 0;
  std::vector<Group> groups;
  const std::vector<Line> lines = column_lines(blocks.data(), num_blocks, rank, std::max(in, 1));
  for (const auto& members : choose_groups(lines, std::max(in, 1))) groups.push_back(make_group(members, lines, std::max(in, 1), values));
  const Rows rows = row_lists(blocks.data(), num_blocks, rank, out);
  head.num_u = int32_t(u), head.num_v = int32_t(v);
  head.num_groups = int32_t(groups.size());
  head.num_tiles = int32_t(rows.tiles.size()) - 1;
  head.tile_values = (values + kAlign - 1) / kAlign * kAlign;
  head.strip_values = head.tile_values + int32_t(rows.tile_lines.size()) * kTile;
  head.num_values = head.strip_values + int32_t(rows.strip_lines.size()) * kStrip;
  auto* data = new std::vector<int32_t>(sizeof(Header) / sizeof(int32_t));
  head.blocks = append(*data, blocks);
  head.groups = append(*data, groups);
  head.tiles = append(*data, rows.tiles);
  head.tile_lines = append(*data, rows.tile_lines);
  head.strips = append(*data, rows.strips);
  head.strip_lines = append(*data, rows.strip_lines);
  std::memcpy(data->data(), &head, sizeof(Header));
  *size = int64_t(data->size());
  return data;
}

GBLR_API void gblr_plan_take(void* handle, int32_t* plan) {
  auto* data = static_cast<std::vector<int32_t>*>(handle);
  std::copy(data->begin(), data->end(), plan);
  delete data;
}

// `bytes` is 4 for float32 and 2 for bfloat16, here and below; numbers are moved, not read. `spread` says how u and v lie:
// cropped, or as factors (zeros outside of blocks are the caller's). Returns 1 where the plan is for other sizes.
GBLR_API int gblr_gather(const int32_t* data, int bytes, int spread, const void* u, const void* v, void* values, int64_t num_u,
                         int64_t num_v, int64_t num_values) {
  const Plan plan(data);
  if (!fits(plan.head, spread, num_u, num_v, num_values)) return 1;
  const auto run = [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (spread) gather<Spread>(plan, (const T*)u, (const T*)v, (T*)values);
    else gather<Cropped>(plan, (const T*)u, (const T*)v, (T*)values);
  };
  if (bytes == 4) run((int32_t*)nullptr);
  if (bytes == 2) run((int16_t*)nullptr);
  return 0;
}

GBLR_API int gblr_scatter(const int32_t* data, int bytes, int spread, const void* values, void* u, void* v, int64_t num_u,
                          int64_t num_v, int64_t num_values) {
  const Plan plan(data);
  if (!fits(plan.head, spread, num_u, num_v, num_values)) return 1;
  const auto run = [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (spread) scatter<Spread>(plan, (const T*)values, (T*)u, (T*)v);
    else scatter<Cropped>(plan, (const T*)values, (T*)u, (T*)v);
  };
  if (bytes == 4) run((int32_t*)nullptr);
  if (bytes == 2) run((int16_t*)nullptr);
  return 0;
}
