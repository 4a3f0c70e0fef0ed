// How attention is cut into blocks of threads: rows that a block holds, and rows of the tiles that
// pass through its shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "warp_mma.h"

namespace zero_ext::cuda {

enum class AttentionPass : std::uint8_t { forward, dq, dkdv };

template <class T, int kDim, AttentionPass kPass>
struct AttentionTiling {
  static constexpr bool kWide = std::is_same_v<T, float>;
  static constexpr bool kForward = kPass == AttentionPass::forward;
  static constexpr bool kColumns = kPass == AttentionPass::dkdv;
  // Registers and shared memory bound all of them, see docs/contributing/cuda_kernels.md.
  //
  // Bands of 16 rows of a warp: a fragment that it loads from a tile is multiplied with all of
  // them.
  static constexpr int kBands = kWide || kDim > 128 || (kColumns && kDim > 64) ? 1 : 2;
  static constexpr int kTile = kWide         ? (kDim <= 64 ? 32 : 16)
                               : kDim <= 64  ? (kForward   ? 64
                                                : kColumns ? 16
                                                           : 32)
                               : kDim <= 128 ? (kForward || kColumns ? 32 : 16)
                                             : 16;
  // Rows of a block of threads, whatever the layout's blocks are.
  static constexpr int kRows = kDim <= 64    ? 64
                               : kDim <= 128 ? (kWide && !kForward ? 32 : 64)
                               : kWide       ? 16
                               : kForward    ? 64
                                             : 32;
  static constexpr int kStages = kWide && kDim > 128 && !kForward ? 1 : 2;
  static constexpr int kWarps = kRows / (kBands * kBandRows);
  static constexpr int kThreads = kWarps * kWarpLanes;
  // Blocks of threads that a processor is to have room for.
  static constexpr int kMinBlocks = kDim > 64 ? 1 : kWide && !kForward ? 2 : 3;
};

// Shared memory that every device of compute capability 8.0 and higher gives a block that asks.
inline constexpr int kMaxSharedBytes = 99 << 10;

}  // namespace zero_ext::cuda
