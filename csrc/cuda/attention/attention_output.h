// Where kernels write rows of results, 16 bytes a lane.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../core/base/numeric_types.h"
#include "warp_mma.h"

namespace zero_ext::cuda {

// Elements [batch, heads, rows, dim], contiguous.
template <class T>
struct OutputRows {
  T* data;
  std::int64_t heads;
  std::int32_t rows;
  std::int32_t dim;

  // Writes the sums of a band whose first row is `first`, each row times its factor: those of a
  // lane are rows lane / 4 and 8 below. They pass through `staging`, shared memory of 16 rows of
  // tiles that no other warp uses.
  template <int kDim, class ThreadBlock>
  ZERO_EXT_DEVICE void store(const ThreadBlock& thread_block, std::int32_t batch, std::int32_t head,
                             std::int32_t first, const Registers<float, 2>& factors,
                             const Registers<float, kDim / 2>& sums, T* staging) const {
    using Rows = TileRows<T, kDim>;
    sync_warp();  // what was read of the staging before
    each_lane([&](int local, int lane) {
      ZERO_EXT_UNROLL
      for (int i = 0; i < kDim / 2; i += 2) {
        const int row = i % 4 / 2;
        T* to = staging + (lane / 4 + 8 * row) * Rows::kStride + i / 4 * 8 + 2 * (lane % 4);
        const float factor = factors.at[local][row];
        store_pair(to, sums.at[local][i] * factor, sums.at[local][i + 1] * factor);
      }
    });
    sync_warp();
    T* band = data + ((batch * heads + head) * rows + first) * dim;
    each_lane([&](int, int lane) {
      ZERO_EXT_UNROLL
      for (int i = 0; i < kBandRows * Rows::kChunks / kWarpLanes; ++i) {
        const int chunk = i * kWarpLanes + lane;
        const int row = chunk / Rows::kChunks;
        const int column = chunk % Rows::kChunks * Rows::kChunk;
        if (first + row >= rows || column >= dim) continue;
        thread_block.write16(band + std::int64_t{row} * dim + column,
                             staging + row * Rows::kStride + column);
      }
    });
  }

 private:
  static ZERO_EXT_DEVICE void store_pair(T* to, float first, float second) {
    if constexpr (std::is_same_v<T, float>) {
      *reinterpret_cast<TwoFloats*>(to) = {{first, second}};
    } else {
      *reinterpret_cast<std::uint32_t*>(to) = pack_pair<T>(first, second);
    }
  }
};

}  // namespace zero_ext::cuda
