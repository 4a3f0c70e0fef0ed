// The layout as the attention kernels read it: a block of threads has 16 to 64 rows, whatever the
// blocks of the layout are, and passes over the union of their lists.
//
// A union is written once for all batches and heads, by a kernel that checks the lists it reads.
// Whatever the tensors of the layout hold, attention finds offsets and blocks within bounds.
#pragma once

#include <cstdint>

#include "../common/device_math.h"
#include "../common/error_recording.h"
#include "../common/nested_grid.h"
#include "../common/warp_registers.h"
#include "../common/warp_shuffle.h"

namespace zero_ext::cuda {

// Beyond every row, and far from the end of the integers.
inline constexpr std::int32_t kAbsent = 1 << 30;

// Rows of a block of threads come in bands of 16, at most four of them. An entry of a union is a
// block times 16, plus a bit for each band that has the block in its list. So is a position: the
// first of 16 rows, which is a multiple of 16, plus the bits.
inline constexpr std::int32_t kBandBits = 15;

// The union of the lists of some rows (or columns) of blocks, whose rows are at most 2^30.
struct BlockList {
  const std::int32_t* entries;
  std::int32_t count;
  int shift;  // log2 of the rows of a block

  template <int kTile>
  ZERO_EXT_FUNCTION std::int32_t tiles() const {
    return ((count << shift) + kTile - 1) / kTile;
  }
  // Position of the `group`th 16 rows of the blocks, counted over all of them.
  ZERO_EXT_FUNCTION std::int32_t position(std::int32_t group) const {
    const std::int32_t row = group * 16;
    const std::int32_t slot = row >> shift;
    if (slot >= count) return kAbsent;
    const std::int32_t inside = row & ((1 << shift) - 1);
    const std::int32_t entry = entries[slot];
    return (((entry & ~kBandBits) >> 4) << shift) + inside + (entry & kBandBits);
  }
};

// The unions of one of the two copies of a layout, by rows or by columns.
struct BlockLists {
  const std::int32_t* extents;  // [layout heads, unions, 2]: first entry and count
  const std::int32_t* entries;
  std::int64_t head_stride;  // of extents; 0 where all heads share a layout
  int shift;                 // log2 of the rows of a block
  int span;                  // rows that share a union

  ZERO_EXT_FUNCTION BlockList of(std::int64_t head, std::int32_t first_row) const {
    const std::int32_t* own = extents + head * head_stride + first_row / span * std::int64_t{2};
    return {entries + own[0], own[1], shift};
  }
};

// What only the device sees of a layout: its lists lie in `blocks`, which ascend in each list and
// are below `limit`. Records what is wrong with it.
struct CheckLists {
  DeviceOp op;
  DeviceArgument pointers_name;
  DeviceArgument blocks_name;
  DeviceErrorRecord* errors;
  const std::int32_t* pointers;  // [heads, count + 1]
  const std::int32_t* blocks;    // [total]
  std::int64_t heads;
  std::int64_t count;
  std::int64_t total;
  std::int64_t limit;

  ZERO_EXT_FUNCTION void operator()(std::int64_t thread, std::int64_t threads) const {
    for_each_nested(thread, threads, heads, count, [&](std::int64_t head, std::int64_t list) {
      const std::int64_t at = head * (count + 1) + list;
      const std::int64_t begin = pointers[at];
      const std::int64_t end = pointers[at + 1];
      // Lists of heads that overlap would have unions that do.
      if (begin < 0 || begin > total || (at > 0 && begin < pointers[at - 1])) {
        refuse(pointers_name, at, begin, ExpectedValue::ascending_offset);
      } else if (end < begin || end > total) {
        refuse(pointers_name, at + 1, end, ExpectedValue::ascending_offset);
      } else {
        check_blocks(begin, end);
      }
    });
  }

 private:
  ZERO_EXT_FUNCTION void check_blocks(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t i = begin; i < end; ++i) {
      if (blocks[i] < 0 || blocks[i] >= limit || (i > begin && blocks[i] <= blocks[i - 1])) {
        return refuse(blocks_name, i, blocks[i], ExpectedValue::ascending_block);
      }
    }
  }
  ZERO_EXT_FUNCTION void refuse(DeviceArgument argument, std::int64_t i, std::int64_t value,
                                ExpectedValue expected) const {
    record_error(errors,
                 {op, argument, i, DeviceField::entry, static_cast<double>(value), expected});
  }
};

// Writes the unions of lists, those of MergeLists::lists neighbors each. Once CheckLists or
// another kernel has recorded an error, all are empty. Another stream may take the error in
// between: lists of no meaning give unions that are within bounds. One warp a union.
struct MergeLists {
  static constexpr int kThreads = 128;
  static constexpr int kSharedBytes = 0;
  static constexpr int kWarps = kThreads / kWarpLanes;
  static constexpr int kMax = 4;  // lists of a union

  CheckLists layout;
  int lists;              // of a union
  int bands;              // of a list
  std::int32_t* extents;  // [heads, unions, 2]
  std::int32_t* entries;  // [total]

  // For blocks of 2^shift rows and blocks of threads of `rows`; without memory for the results.
  static MergeLists of(const CheckLists& layout, int shift, int rows) {
    const int lists = rows >> shift > 1 ? rows >> shift : 1;
    return {layout, lists, rows / lists / 16, nullptr, nullptr};
  }
  // Of heads that share a layout, there is one.
  BlockLists result(int shift, int rows) const {
    const int span = rows > 1 << shift ? rows : 1 << shift;
    return {extents, entries, layout.heads == 1 ? 0 : 2 * unions(), shift, span};
  }

  ZERO_EXT_FUNCTION std::int64_t unions() const { return (layout.count + lists - 1) / lists; }
  std::int64_t blocks() const { return (layout.heads * unions() + kWarps - 1) / kWarps; }

  template <class ThreadBlock>
  ZERO_EXT_DEVICE void operator()(const ThreadBlock& thread_block) const {
    const std::int64_t number =
        thread_block.block() * (thread_block.threads() / kWarpLanes) + thread_block.warp();
    if (number >= layout.heads * unions()) return;
    const bool refused = has_error(layout.errors);
    const std::int64_t first = number % unions() * lists;
    const std::int32_t* own = layout.pointers + number / unions() * (layout.count + 1) + first;
    ListCursor cursors[kMax];
    ZERO_EXT_UNROLL
    for (int list = 0; list < kMax; ++list) {
      const bool there = !refused && list < lists && first + list < layout.count;
      cursors[list] = {there ? clamp_offset(own[list]) : 0,
                       there ? clamp_offset(own[list + 1]) : 0};
    }
    const std::int32_t begin = cursors[0].next;
    const std::int32_t found = merge(cursors, entries + begin, clamp_offset(layout.total) - begin);
    each_lane([&](int, int lane) {
      if (lane < 2) extents[2 * number + lane] = lane == 0 ? begin : found;
    });
  }

 private:
  // What is left of a list.
  struct ListCursor {
    std::int32_t next;
    std::int32_t end;
  };

  ZERO_EXT_FUNCTION std::int32_t clamp_offset(std::int64_t offset) const {
    return static_cast<std::int32_t>(offset < 0              ? 0
                                     : offset < layout.total ? offset
                                                             : layout.total);
  }

  // The number of entries, at most `capacity`.
  ZERO_EXT_DEVICE std::int32_t merge(ListCursor (&cursors)[kMax], std::int32_t* to,
                                     std::int32_t capacity) const {
    std::int32_t found = 0;
    while (found < capacity) {
      const std::int32_t lowest = lowest_of(cursors);
      if (lowest >= layout.limit) break;
      std::uint32_t windows[kMax];
      std::uint32_t any = 0;
      ZERO_EXT_UNROLL
      for (int list = 0; list < kMax; ++list) {
        any |= windows[list] = window(lowest, cursors[list]);
      }
      each_lane([&](int, int lane) {
        const std::int32_t at = found + count_bits(any & ((1U << lane) - 1));
        if ((any >> lane & 1) == 0 || at >= capacity) return;
        std::int32_t entry = (lowest + lane) << 4;
        ZERO_EXT_UNROLL
        for (int list = 0; list < kMax; ++list) {
          if ((windows[list] >> lane & 1) != 0) entry |= ((1 << bands) - 1) << (list * bands);
        }
        to[at] = entry;
      });
      found += count_bits(any);
    }
    return found < capacity ? found : capacity;
  }

  // The lowest block that any list still has, or the limit. A list ends where it leaves the bounds.
  ZERO_EXT_FUNCTION std::int32_t lowest_of(ListCursor (&cursors)[kMax]) const {
    auto lowest = static_cast<std::int32_t>(layout.limit);
    ZERO_EXT_UNROLL
    for (ListCursor& each : cursors) {
      if (each.next >= each.end) continue;
      const std::int32_t block = layout.blocks[each.next];
      if (block < 0 || block >= layout.limit) {
        each.end = each.next;
      } else if (block < lowest) {
        lowest = block;
      }
    }
    return lowest;
  }

  // Takes the blocks of a list from `lowest` on to 31 above: a bit each.
  ZERO_EXT_DEVICE std::uint32_t window(std::int32_t lowest, ListCursor& cursors) const {
    Registers<std::uint32_t, 1> bits;
    each_lane([&](int local, int lane) {
      bits.at[local][0] = 0;
      if (lane >= cursors.end - cursors.next) return;
      const std::int32_t block = layout.blocks[cursors.next + lane];
      if (block < lowest || block >= layout.limit || block - lowest >= kWarpLanes) return;
      bits.at[local][0] = 1U << (block - lowest);
    });
    or_of_warp(bits);
    cursors.next += count_bits(bits.at[0][0]);
    return bits.at[0][0];
  }
};

}  // namespace zero_ext::cuda
