// How the numbers of a packed GBLR matrix lie in memory, as one array of int32 that both Python and the kernels read.
//
// "Line": one of the num_blocks * block_rank rows of the factors; line i has a column interval (its v) and a row interval (its u).
// Columns: lines in groups of 4 with nearly the same interval. A group has a core, which all four read together, stored
//   [column][4] with zeros where a line is not there; what sticks out of the core at either end is stored line by line.
// Rows: tiles of 64 outputs. A line that covers a whole tile has 64 numbers there; where it covers only a part of a tile, it
//   has 8 numbers in each of the tile's strips of 8 outputs that it touches, with zeros outside.
// Values: first all groups, then all whole tiles, then all strips.
#pragma once
#include <cstdint>

namespace gblr {

constexpr int kGroup = 4;
constexpr int kTile = 64;
constexpr int kStrip = 8;
constexpr int kStrips = kTile / kStrip;

struct Span {  // a cyclic run of columns
  int32_t start, length;
};

struct Group {
  int32_t line[kGroup];  // -1: none
  Span core;
  Span head[kGroup], tail[kGroup];
  int32_t begin[kGroup], end[kGroup];  // columns of the core that are the line's own; the others are zeros
  int32_t values;                      // where its numbers begin
};

struct Header {
  int32_t out_features, in_features, num_blocks, block_rank;
  int32_t num_lines, num_groups, num_tiles, num_values;
  int32_t tile_values, strip_values;  // where those numbers begin
  int32_t num_u, num_v;               // numbers of the cropped contents
  int32_t blocks, groups, tiles, tile_lines, strips, strip_lines;  // where the arrays begin, in int32
};

struct Block {
  int32_t row_width, row_location, col_width, col_location;
  int32_t u, v;  // where its numbers begin in the cropped contents
};

// Views of the arrays behind the header.
struct Plan {
  const Header& head;
  const Block* blocks;
  const Group* groups;
  const int32_t* tiles;        // (num_tiles + 1): first entry of each in tile_lines
  const int32_t* tile_lines;   // a line for every 64 values
  const int32_t* strips;       // (8 * num_tiles + 1)
  const int32_t* strip_lines;  // a line for every 8 values

  explicit Plan(const int32_t* data)
      : head(*reinterpret_cast<const Header*>(data)),
        blocks(reinterpret_cast<const Block*>(data + head.blocks)),
        groups(reinterpret_cast<const Group*>(data + head.groups)),
        tiles(data + head.tiles),
        tile_lines(data + head.tile_lines),
        strips(data + head.strips),
        strip_lines(data + head.strip_lines) {}
};

}  // namespace gblr
