// What the attention kernels are told: tensors by address and strides, sizes, the layout.
#pragma once

#include <cstdint>

#include "../../core/numeric_types.h"
#include "../../core/portability.h"
#include "../machine/fault.h"

namespace zero_ext::cuda {

// Elements [batch, heads, rows, head dim], the last ones next to each other.
template <class T>
struct Heads {
  T* data;
  std::int64_t batch_stride;
  std::int64_t head_stride;
  std::int64_t row_stride;

  ZERO_EXT_FUNCTION T* of(std::int64_t batch, std::int64_t head) const {
    return data + batch * batch_stride + head * head_stride;
  }
};

// Elements of one batch and head.
template <class T>
struct Matrix {
  T* data;
  std::int64_t row_stride;
  std::int32_t rows;
  std::int32_t dim;
};

struct AttentionSizes {
  std::int64_t batch;
  std::int32_t query_heads;
  std::int32_t key_heads;  // divides query_heads: neighbouring query heads share a key head
  std::int32_t query_length;
  std::int32_t key_length;
  std::int32_t dim;
};

// Beyond every row, and far from the end of the integers.
inline constexpr std::int32_t kAbsent = 1 << 30;

// The blocks of one row (or column) of blocks.
struct BlockList {
  const std::int32_t* blocks;
  std::int64_t count;
  int shift;  // log2 of the rows of a block

  template <int kTile>
  ZERO_EXT_FUNCTION std::int64_t tiles() const {
    return ((count << shift) + kTile - 1) / kTile;
  }
  // First row of the `group`th 16 rows of the blocks, counted over all of them.
  ZERO_EXT_FUNCTION std::int32_t group_start(std::int64_t group) const {
    const std::int64_t position = group * 16;
    const std::int64_t slot = position >> shift;
    if (slot >= count) return kAbsent;
    const std::int32_t inside = static_cast<std::int32_t>(position) & ((1 << shift) - 1);
    return (blocks[slot] << shift) + inside;
  }
};

// One of the two copies of a layout: by rows or by columns.
struct BlockLists {
  const std::int32_t* pointers;  // [layout heads, blocks + 1]
  const std::int32_t* blocks;
  std::int64_t head_stride;  // of pointers; 0 where all heads share a layout
  int shift;

  ZERO_EXT_FUNCTION BlockList of(std::int64_t head, std::int64_t index) const {
    const std::int32_t* own = pointers + head * head_stride + index;
    return {blocks + own[0], std::int64_t{own[1]} - own[0], shift};
  }
};

// An additive bias; strides of dimensions along which it is repeated are 0.
struct AttentionBias {
  const void* data;  // null: none
  core::NumericType type;
  std::int64_t batch_stride;
  std::int64_t head_stride;
  std::int64_t query_stride;
  std::int64_t key_stride;
};

// Its gradient, float32 [of bias]; strides as those of the bias, but of a contiguous tensor.
struct BiasGradient {
  float* data;  // null: not asked for
  std::int64_t batch_stride;
  std::int64_t head_stride;
  std::int64_t query_stride;
  std::int64_t key_stride;
};

// What only the device sees of a layout: its lists lie in `blocks`, which ascend in each list and
// are below `limit`.
struct CheckLists {
  const char* op;
  const char* pointers_name;
  const char* blocks_name;
  const std::int32_t* pointers;  // [heads, count + 1]
  const std::int32_t* blocks;    // [total]
  std::int64_t heads;
  std::int64_t count;
  std::int64_t total;
  std::int64_t limit;

  ZERO_EXT_FUNCTION void operator()(std::int64_t thread, std::int64_t threads) const {
    for (std::int64_t list = thread; list < heads * count; list += threads) {
      const std::int64_t at = list / count * (count + 1) + list % count;
      const std::int64_t begin = pointers[at];
      const std::int64_t end = pointers[at + 1];
      if (begin < 0 || begin > total) {
        fail(op, pointers_name, at, "entry", static_cast<double>(begin),
             "an offset into the blocks");
      }
      if (end < begin || end > total) {
        fail(op, pointers_name, at + 1, "entry", static_cast<double>(end),
             "an offset into the blocks, not below the one before");
      }
      for (std::int64_t i = begin; i < end; ++i) {
        if (blocks[i] < 0 || blocks[i] >= limit || (i > begin && blocks[i] <= blocks[i - 1])) {
          fail(op, blocks_name, i, "entry", static_cast<double>(blocks[i]),
               "a block of the layout, above the one before in its list");
        }
      }
    }
  }
};

}  // namespace zero_ext::cuda
