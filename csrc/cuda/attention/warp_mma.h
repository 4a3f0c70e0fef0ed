// Products of a warp: its bands of 16 rows times a tile in shared memory.
//
// Sums of 16 x n elements lie as those of mma.m16n8k16 do, for every dtype: element i of a lane is
// in the 8 columns i / 4, row lane / 4, or 8 rows below for i % 4 >= 2, and column
// 2 (lane % 4) + i % 2 of the eight.
#pragma once

#include <cmath>
#include <cstdint>

#include "../common/device_math.h"
#include "../common/warp_registers.h"
#include "../common/warp_shuffle.h"

namespace zero_ext::cuda {

inline constexpr int kBandRows = 16;

// Rows of a tile in shared memory. One access more than the elements take, so that the eight rows
// which a warp reads at once are in different banks.
template <class T, int kDim>
struct TileRows {
  static constexpr int kChunk = 16 / static_cast<int>(sizeof(T));  // elements of one access
  static constexpr int kChunks = kDim / kChunk;
  static constexpr int kStride = kDim + kChunk;
  static constexpr int kBandElements = kBandRows * kStride;
  static constexpr int bytes(int rows) { return rows * kStride * static_cast<int>(sizeof(T)); }
};

// Which groups of 16 columns of a tile a band attends to: a bit each. The same in all lanes, so
// what depends on it is skipped by whole warps.
using GroupMask = std::uint32_t;

ZERO_EXT_HOST_DEVICE bool has_group(GroupMask masks, int group) {
  return (masks >> group & 1) != 0;
}

// Of all bands, with all groups. As constants they leave no branches in what is computed from them:
// a branch around each fragment lets no load overlap with products.
template <int kGroups, int kBands>
struct AllGroups {
  GroupMask masks[kBands];

  ZERO_EXT_HOST_DEVICE AllGroups() {
    ZERO_EXT_UNROLL
    for (GroupMask& mask : masks) mask = (GroupMask{1} << kGroups) - 1;
  }
  ZERO_EXT_HOST_DEVICE bool are(const GroupMask (&others)[kBands]) const {
    bool same = true;
    ZERO_EXT_UNROLL
    for (int band = 0; band < kBands; ++band) same &= others[band] == masks[band];
    return same;
  }
};

// Of 16-bit elements, by tensor cores.
template <class ThreadBlock, class T, int kDim, int kTile, int kBands>
struct WarpMma {
  static constexpr int kStride = TileRows<T, kDim>::kStride;
  static constexpr int kScratch = 0;
  using Matrices = Registers<std::uint32_t, 4>;
  using Scores = Registers<float, kTile / 2>;
  using Sums = Registers<float, kDim / 2>;

  // scores[band] [16, kTile] = rows [16, kDim] of the band times tile [kTile, kDim], transposed;
  // zeros in groups outside the band's mask.
  static ZERO_EXT_DEVICE void scores(const ThreadBlock& thread_block, const T* rows, const T* tile,
                                     const GroupMask (&masks)[kBands], Scores (&scores)[kBands]) {
    for_bands([&](int band) { scores[band].fill(0.0F); });
    if (any_of(masks) == 0) return;
    ZERO_EXT_UNROLL
    for (int k = 0; k < kDim; k += 16) {
      Matrices left[kBands];
      for_bands([&](int band) {
        if (masks[band] == 0) return;
        const T* own = rows + band * TileRows<T, kDim>::kBandElements;
        thread_block.template load_matrices<false>(
            left[band], [&](int lane) { return own + (lane % 16) * kStride + k + lane / 16 * 8; });
      });
      each_constant<kTile / 16>([&]<int n>() {
        if (!has_group(any_of(masks), n)) return;
        Matrices right;
        thread_block.template load_matrices<false>(right, [&](int lane) {
          return tile + (16 * n + lane / 16 * 8 + lane % 8) * kStride + k + lane / 8 % 2 * 8;
        });
        for_bands([&](int band) {
          if (!has_group(masks[band], n)) return;
          thread_block.template multiply<T, 8 * n, 0>(scores[band], left[band], right);
          thread_block.template multiply<T, 8 * n + 4, 2>(scores[band], left[band], right);
        });
      });
    }
  }

  // sums[band] [16, kDim] += weights[band] [16, kTile], rounded to T, times tile [kTile, kDim],
  // over the groups of the band's mask.
  static ZERO_EXT_DEVICE void add(const ThreadBlock& thread_block, const Scores (&weights)[kBands],
                                  const T* tile, float*, const GroupMask (&masks)[kBands],
                                  Sums (&sums)[kBands]) {
    each_constant<kTile / 16>([&]<int group>() {
      if (!has_group(any_of(masks), group)) return;
      constexpr int k = 16 * group;
      Matrices left[kBands];
      for_bands([&](int band) { left[band] = packed(weights[band], k); });
      each_constant<kDim / 16>([&]<int n>() {
        Matrices right;
        thread_block.template load_matrices<true>(right, [&](int lane) {
          return tile + (k + lane % 16) * kStride + 16 * n + lane / 16 * 8;
        });
        for_bands([&](int band) {
          if (!has_group(masks[band], group)) return;
          thread_block.template multiply<T, 8 * n, 0>(sums[band], left[band], right);
          thread_block.template multiply<T, 8 * n + 4, 2>(sums[band], left[band], right);
        });
      });
    });
  }

 private:
  template <class Visit>
  static ZERO_EXT_DEVICE void for_bands(const Visit& visit) {
    ZERO_EXT_UNROLL
    for (int band = 0; band < kBands; ++band) visit(band);
  }
  static ZERO_EXT_DEVICE GroupMask any_of(const GroupMask (&masks)[kBands]) {
    GroupMask any = 0;
    for_bands([&](int band) { any |= masks[band]; });
    return any;
  }
  // Weights [16, 16] from column k on as the left matrix of a product.
  static ZERO_EXT_DEVICE Matrices packed(const Scores& weights, int k) {
    Matrices left;
    each_lane([&](int local, int) {
      ZERO_EXT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float* pair = &weights.at[local][k / 2 + 2 * i];
        left.at[local][i] = pack_pair<T>(pair[0], pair[1]);
      }
    });
    return left;
  }
};

struct alignas(16) FourFloats {
  float at[4];
};
struct alignas(8) TwoFloats {
  float at[2];
};

// Of float32 elements, by fused multiply-adds; a warp has one band.
template <class ThreadBlock, int kDim, int kTile>
struct WarpMma<ThreadBlock, float, kDim, kTile, 1> {
  static constexpr int kStride = TileRows<float, kDim>::kStride;
  static constexpr int kScratchStride = kTile + 4;
  static constexpr int kScratch = kBandRows * kScratchStride;  // floats of a warp
  using Scores = Registers<float, kTile / 2>;
  using Sums = Registers<float, kDim / 2>;

  static ZERO_EXT_DEVICE const FourFloats& four(const float* from) {
    return *reinterpret_cast<const FourFloats*>(from);
  }
  static ZERO_EXT_DEVICE const TwoFloats& two(const float* from) {
    return *reinterpret_cast<const TwoFloats*>(from);
  }

  static ZERO_EXT_DEVICE void scores(const ThreadBlock&, const float* rows, const float* tile,
                                     const GroupMask (&masks)[1], Scores (&scores)[1]) {
    scores[0].fill(0.0F);
    each_lane([&](int local, int lane) {
      const float* own = rows + lane / 4 * kStride;
      const float* other = tile + 2 * (lane % 4) * kStride;
      ZERO_EXT_UNROLL_BY(4)
      for (int k = 0; k < kDim; k += 4) {
        const FourFloats upper = four(own + k);
        const FourFloats lower = four(own + 8 * kStride + k);
        ZERO_EXT_UNROLL
        for (int i = 0; i < kTile / 4; ++i) {
          if (!has_group(masks[0], i / 4)) continue;
          const FourFloats right = four(other + (i / 2 * 8 + i % 2) * kStride + k);
          float& first = scores[0].at[local][i / 2 * 4 + i % 2];
          float& second = scores[0].at[local][i / 2 * 4 + i % 2 + 2];
          ZERO_EXT_UNROLL
          for (int j = 0; j < 4; ++j) {
            first = ::fmaf(upper.at[j], right.at[j], first);
            second = ::fmaf(lower.at[j], right.at[j], second);
          }
        }
      }
    });
  }

  // `scratch` is shared memory of this warp alone: kScratch floats.
  static ZERO_EXT_DEVICE void add(const ThreadBlock&, const Scores (&weights)[1], const float* tile,
                                  float* scratch, const GroupMask (&masks)[1], Sums (&sums)[1]) {
    each_lane([&](int local, int lane) {
      float* to = scratch + lane / 4 * kScratchStride + 2 * (lane % 4);
      ZERO_EXT_UNROLL
      for (int i = 0; i < kTile / 2; i += 2) {
        const TwoFloats pair{{weights[0].at[local][i], weights[0].at[local][i + 1]}};
        *reinterpret_cast<TwoFloats*>(to + i % 4 / 2 * 8 * kScratchStride + i / 4 * 8) = pair;
      }
    });
    sync_warp();
    each_lane([&](int local, int lane) {
      const float* own = scratch + lane / 4 * kScratchStride;
      ZERO_EXT_UNROLL_BY(1)
      for (int k = 0; k < kTile; ++k) {
        if (!has_group(masks[0], k / 16)) continue;
        const float upper = own[k];
        const float lower = own[8 * kScratchStride + k];
        const float* row = tile + k * kStride + 2 * (lane % 4);
        ZERO_EXT_UNROLL
        for (int n = 0; n < kDim / 8; ++n) {
          const TwoFloats right = two(row + 8 * n);
          float* to = &sums[0].at[local][4 * n];
          to[0] = ::fmaf(upper, right.at[0], to[0]);
          to[1] = ::fmaf(upper, right.at[1], to[1]);
          to[2] = ::fmaf(lower, right.at[0], to[2]);
          to[3] = ::fmaf(lower, right.at[1], to[3]);
        }
      }
    });
    sync_warp();
  }
};

}  // namespace zero_ext::cuda
