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
  // Registers and shared memory bound both; see docs/cuda_kernels.md.
  static constexpr int kTile = kWide ? (kDim <= 64 ? 32 : 16)
                                     : (kDim <= (kForward ? 128 : 64) ? 64 : kDim <= 128 ? 32 : 16);
  static constexpr int kMostRows = kWide ? (kDim <= 64              ? 64
                                            : kDim <= 128           ? (kForward ? 64 : 32)
                                                                    : 16)
                                         : (kDim <= 128 || kForward ? 64 : 32);
  static constexpr int kStages = kWide && kDim > 128 && !kForward ? 1 : 2;
  static constexpr int kMostThreads = kMostRows / kWarpRows * 32;

  // Rows of a block of threads: a block of the layout is a multiple of them.
  static constexpr int rows(int shift) { return 1 << shift < kMostRows ? 1 << shift : kMostRows; }
};

// Shared memory that every device of compute capability 8.0 and higher gives a block that asks.
inline constexpr int kMostSharedBytes = 99 << 10;

}  // namespace zero_ext::cuda
