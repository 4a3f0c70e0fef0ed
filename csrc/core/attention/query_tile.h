// The tiles that work and scratch memory are cut into: runs of queries, and the keys they see, some
// at a time. See optimizer_kernel.h on inclusion.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../base/rounding.h"
#include "attention_args.h"

namespace zero_ext::core {
namespace {

// Rows and lanes of a tile; every row of scratch memory is this long or the padded head dim.
inline constexpr std::int64_t kTile = 64;

// Head dim as rows of scratch memory have it, with zeros at the end.
constexpr std::int64_t padded_dim(std::int64_t head_dim) { return round_up(head_dim, 16); }

// Queries of a row tile; the last one may have fewer.
inline std::int64_t tile_length(const AttentionArgs& args) {
  return std::min(args.layout.block, kTile);
}

// Consecutive queries of one head that see the same blocks.
struct QueryTile {
  std::int64_t batch;
  std::int64_t head;
  std::int64_t first;  // query
  std::int64_t count;  // at most kTile
  const std::int32_t* blocks;
  const std::int32_t* blocks_end;

  static QueryTile at(const AttentionArgs& args, std::int64_t batch, std::int64_t head,
                      std::int64_t index) {
    const BlockRows& layout = args.layout;
    const std::int64_t first = index * tile_length(args);
    const std::int64_t layout_head = layout.heads == 1 ? 0 : head;
    const std::int32_t* pointer =
        layout.pointers + layout_head * (layout.row_blocks + 1) + first / layout.block;
    return {batch,
            head,
            first,
            std::min(tile_length(args), args.query_length - first),
            layout.columns + pointer[0],
            layout.columns + pointer[1]};
  }
};

// Up to kTile keys, in runs of consecutive ones.
struct KeyPanel {
  struct KeyRange {
    std::int64_t first;  // key
    std::int64_t count;
  };
  std::int64_t count = 0;
  int range_count = 0;
  KeyRange ranges[kTile / 16];

  std::int64_t last_key() const {
    return ranges[range_count - 1].first + ranges[range_count - 1].count - 1;
  }

  // Calls visit(key, position in the panel) for every key.
  template <class Visit>
  void for_each(const Visit& visit) const {
    std::int64_t position = 0;
    for (int i = 0; i < range_count; ++i) {
      for (std::int64_t k = 0; k < ranges[i].count; ++k) visit(ranges[i].first + k, position++);
    }
  }
};

// Calls visit(panel) for the keys in [first_key, end_key) that a row tile sees, in order. Blocks
// that lie above a causal diagonal are left out.
template <class Visit>
void for_each_key_panel(const AttentionArgs& args, const QueryTile& tile, std::int64_t first_key,
                        std::int64_t end_key, const Visit& visit) {
  const std::int64_t block = args.layout.block;
  if (args.causal) {
    const std::int64_t shift = args.key_length - args.query_length;
    end_key = std::min(end_key, tile.first + tile.count + shift);
  }
  KeyPanel panel;
  const std::int32_t* at =
      std::lower_bound(tile.blocks, tile.blocks_end, static_cast<std::int32_t>(first_key / block));
  for (; at != tile.blocks_end; ++at) {
    std::int64_t key = *at * block;
    if (key >= end_key) break;
    const std::int64_t block_end = std::min(key + block, std::min(args.key_length, end_key));
    while (key < block_end) {
      if (panel.count + std::min(block, kTile) > kTile) {
        visit(panel);
        panel = KeyPanel{};
      }
      const std::int64_t count = std::min(block_end - key, kTile);
      panel.ranges[panel.range_count++] = {key, count};
      panel.count += count;
      key += count;
    }
  }
  if (panel.count > 0) visit(panel);
}

}  // namespace
}  // namespace zero_ext::core
