// How attention is cut into blocks of threads: rows that a block keeps, and rows of the tiles that
// pass through its shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_product.h"

namespace zero_ext::cuda {

enum class AttentionPass : std::uint8_t { forward, row_gradient, column_gradient };

template <class T, int kDim, AttentionPass kPass>
struct AttentionShape {
  static constexpr bool kWide = std::is_same_v<T, float>;
  static constexpr bool kForward = kPass == AttentionPass::forward;
  static constexpr bool kColumns = kPass == AttentionPass::column_gradient;
  // Registers and shared memory bound all of them; docs/cuda_kernels.md lists what is taken.
  static constexpr int kTile = kWide         ? (kDim <= 64 ? 32 : 16)
                               : kDim <= 64  ? (kColumns ? 32 : 64)
                               : kDim <= 128 ? (kForward ? 64 : 32)
                                             : 16;
  static constexpr int kMostRows = kDim <= 64    ? 64
                                   : kDim <= 128 ? (kWide && !kForward ? 32 : 64)
                                   : kWide       ? 16
                                   : kForward    ? 64
                                                 : 32;
  static constexpr int kStages = kWide && kDim > 128 && !kForward ? 1 : 2;
  static constexpr int kMostThreads = kMostRows / kWarpRows * 32;
  // Blocks of threads that a processor is to have room for.
  static constexpr int kLeastBlocks = kDim > 64 ? 1 : kWide && !kForward ? 2 : 3;

  // Rows of a block of threads: a block of the layout is a multiple of them.
  static constexpr int rows(int shift) { return 1 << shift < kMostRows ? 1 << shift : kMostRows; }
};

// Shared memory that every device of compute capability 8.0 and higher gives a block that asks.
inline constexpr int kMostSharedBytes = 99 << 10;

}  // namespace zero_ext::cuda
