// Products of a warp: 16 rows times a tile in shared memory.
//
// Sums of 16 x n elements lie as those of mma.m16n8k16 do, for every dtype: element i of a lane is
// in the 8 columns i / 4, row lane / 4, or 8 rows below for i % 4 >= 2, and column
// 2 (lane % 4) + i % 2 of the eight.
#pragma once

#include <cstdint>

#include "../machine/registers.h"

namespace zero_ext::cuda {

inline constexpr int kWarpRows = 16;

// Rows of a tile in shared memory. One access more than the elements take, so that the eight rows
// which a warp reads at once are in different banks.
template <class T, int kDim>
struct TileRows {
  static constexpr int kChunk = 16 / static_cast<int>(sizeof(T));  // elements of one access
  static constexpr int kChunks = kDim / kChunk;
  static constexpr int kStride = kDim + kChunk;
  static constexpr int bytes(int rows) { return rows * kStride * static_cast<int>(sizeof(T)); }
};

// Of 16-bit elements, by tensor cores.
template <class Machine, class T, int kDim, int kTile>
struct Product {
  static constexpr int kLanes = Machine::kLanes;
  static constexpr int kStride = TileRows<T, kDim>::kStride;
  static constexpr int kScratch = 0;
  using Matrices = Registers<std::uint32_t, 4, kLanes>;
  using Scores = Registers<float, kTile / 2, kLanes>;
  using Sums = Registers<float, kDim / 2, kLanes>;

  // scores [16, kTile] = rows [16, kDim] times tile [kTile, kDim], transposed.
  static ZERO_EXT_DEVICE void scores(const Machine& machine, const T* rows, const T* tile,
                                     Scores& scores) {
    scores.fill(0.0F);
    ZERO_EXT_UNROLL
    for (int k = 0; k < kDim; k += 16) {
      Matrices left;
      machine.template load_matrices<false>(
          left, [&](int lane) { return rows + (lane % 16) * kStride + k + lane / 16 * 8; });
      each_constant<kTile / 16>([&]<int n>() {
        Matrices right;
        machine.template load_matrices<false>(right, [&](int lane) {
          return tile + (16 * n + lane / 16 * 8 + lane % 8) * kStride + k + lane / 8 % 2 * 8;
        });
        machine.template multiply<T, 8 * n, 0>(scores, left, right);
        machine.template multiply<T, 8 * n + 4, 2>(scores, left, right);
      });
    }
  }

  // sums [16, kDim] += weights [16, kTile], rounded to T, times tile [kTile, kDim].
  static ZERO_EXT_DEVICE void add(const Machine& machine, const Scores& weights, const T* tile,
                                  float*, Sums& sums) {
    ZERO_EXT_UNROLL
    for (int k = 0; k < kTile; k += 16) {
      Matrices left;
      each_lane(machine, [&](int here, int) {
        ZERO_EXT_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float* pair = &weights.at[here][k / 2 + 2 * i];
          left.at[here][i] = Machine::template pack<T>(pair[0], pair[1]);
        }
      });
      each_constant<kDim / 16>([&]<int n>() {
        Matrices right;
        machine.template load_matrices<true>(right, [&](int lane) {
          return tile + (k + lane % 16) * kStride + 16 * n + lane / 16 * 8;
        });
        machine.template multiply<T, 8 * n, 0>(sums, left, right);
        machine.template multiply<T, 8 * n + 4, 2>(sums, left, right);
      });
    }
  }
};

// Of float32 elements, by fused multiply-adds.
template <class Machine, int kDim, int kTile>
struct Product<Machine, float, kDim, kTile> {
  static constexpr int kLanes = Machine::kLanes;
  static constexpr int kStride = TileRows<float, kDim>::kStride;
  static constexpr int kScratchStride = kTile + 4;
  static constexpr int kScratch = kWarpRows * kScratchStride;  // floats of a warp
  using Scores = Registers<float, kTile / 2, kLanes>;
  using Sums = Registers<float, kDim / 2, kLanes>;

  struct alignas(16) Four {
    float at[4];
  };
  struct alignas(8) Two {
    float at[2];
  };
  static ZERO_EXT_DEVICE const Four& four(const float* from) {
    return *reinterpret_cast<const Four*>(from);
  }
  static ZERO_EXT_DEVICE const Two& two(const float* from) {
    return *reinterpret_cast<const Two*>(from);
  }

  static ZERO_EXT_DEVICE void scores(const Machine& machine, const float* rows, const float* tile,
                                     Scores& scores) {
    scores.fill(0.0F);
    each_lane(machine, [&](int here, int lane) {
      const float* own = rows + lane / 4 * kStride;
      const float* other = tile + 2 * (lane % 4) * kStride;
      ZERO_EXT_UNROLL_BY(4)
      for (int k = 0; k < kDim; k += 4) {
        const Four upper = four(own + k);
        const Four lower = four(own + 8 * kStride + k);
        ZERO_EXT_UNROLL
        for (int i = 0; i < kTile / 4; ++i) {
          const Four right = four(other + (i / 2 * 8 + i % 2) * kStride + k);
          float& first = scores.at[here][i / 2 * 4 + i % 2];
          float& second = scores.at[here][i / 2 * 4 + i % 2 + 2];
          ZERO_EXT_UNROLL
          for (int j = 0; j < 4; ++j) {
            first = Machine::fma(upper.at[j], right.at[j], first);
            second = Machine::fma(lower.at[j], right.at[j], second);
          }
        }
      }
    });
  }

  // `scratch` is shared memory of this warp alone: kScratch floats.
  static ZERO_EXT_DEVICE void add(const Machine& machine, const Scores& weights, const float* tile,
                                  float* scratch, Sums& sums) {
    each_lane(machine, [&](int here, int lane) {
      float* to = scratch + lane / 4 * kScratchStride + 2 * (lane % 4);
      ZERO_EXT_UNROLL
      for (int i = 0; i < kTile / 2; i += 2) {
        const Two pair{{weights.at[here][i], weights.at[here][i + 1]}};
        *reinterpret_cast<Two*>(to + i % 4 / 2 * 8 * kScratchStride + i / 4 * 8) = pair;
      }
    });
    machine.meet_in_warp();
    each_lane(machine, [&](int here, int lane) {
      const float* own = scratch + lane / 4 * kScratchStride;
      ZERO_EXT_UNROLL_BY(1)
      for (int k = 0; k < kTile; ++k) {
        const float upper = own[k];
        const float lower = own[8 * kScratchStride + k];
        const float* row = tile + k * kStride + 2 * (lane % 4);
        ZERO_EXT_UNROLL
        for (int n = 0; n < kDim / 8; ++n) {
          const Two right = two(row + 8 * n);
          float* to = &sums.at[here][4 * n];
          to[0] = Machine::fma(upper, right.at[0], to[0]);
          to[1] = Machine::fma(upper, right.at[1], to[1]);
          to[2] = Machine::fma(lower, right.at[0], to[2]);
          to[3] = Machine::fma(lower, right.at[1], to[3]);
        }
      }
    });
    machine.meet_in_warp();
  }
};

}  // namespace zero_ext::cuda
