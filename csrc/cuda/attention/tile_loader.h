// Brings the rows of a union of lists of blocks through shared memory, a tile at a time, while the
// tile before is computed with. A tile's rows are taken from as many blocks as it takes to fill it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../common/warp_shuffle.h"
#include "attention_layout.h"
#include "attention_params.h"
#include "attention_scores.h"
#include "warp_mma.h"

namespace zero_ext::cuda {

// Begins to copy `count` rows to shared memory, the one in the tile's place i from row index(i);
// zeros where there is none, and in columns beyond the matrix's.
template <int kDim, class Machine, class T, class Index>
ZERO_EXT_DEVICE void copy_rows(const Machine& machine, const Matrix<const T>& from, int count,
                               const Index& index, T* tile) {
  using Rows = TileRows<T, kDim>;
  each_lane([&](int, int lane) {
    for (int i = machine.warp() * kWarpLanes + lane; i < count * Rows::kChunks;
         i += machine.threads()) {
      const int row = i / Rows::kChunks;
      const int column = i % Rows::kChunks * Rows::kChunk;
      const std::int32_t source = index(row);
      const bool there = source < from.rows && column < from.dim;
      const T* address = there ? from.data + source * from.row_stride + column : from.data;
      machine.template copy<16>(tile + row * Rows::kStride + column, address, there);
    }
  });
}

// Numbers of the rows of a matrix: a float each.
struct RowNumbers {
  const float* data;
  std::int32_t rows;
};

// Tiles of two matrices with the same rows, and with kNumbers numbers of each row.
template <class Machine, class T, int kDim, int kTile, int kStages, int kNumbers>
class TileStream {
 public:
  static_assert(kTile % 16 == 0 && (kStages == 1 || kStages == 2));
  static constexpr int kGroups = kTile / 16;
  static constexpr int kTileBytes = TileRows<T, kDim>::bytes(kTile);
  static constexpr int kNumberBytes = kTile * static_cast<int>(sizeof(float));
  static constexpr int kStageBytes = 2 * kTileBytes + kNumbers * kNumberBytes;
  static constexpr int kRing = 4;  // tiles whose places are known
  static constexpr int kBytes = kStages * kStageBytes + kRing * kGroups * 4;

  ZERO_EXT_DEVICE TileStream(const Machine& machine, std::byte* memory)
      : machine_(machine),
        memory_(memory),
        places_(reinterpret_cast<std::int32_t*>(memory + kStages * kStageBytes)) {}

  // The next list and matrices. What the caller began to copy before is there with the first
  // tile. Nothing happens where the list has no blocks.
  ZERO_EXT_DEVICE void begin(const BlockList& list, const Matrix<const T>& first,
                             const Matrix<const T>& second,
                             const RowNumbers (&numbers)[kNumbers == 0 ? 1 : kNumbers]) {
    list_ = list;
    first_ = first;
    second_ = second;
    ZERO_EXT_UNROLL
    for (int i = 0; i < kNumbers; ++i) numbers_[i] = numbers[i];
    tiles_ = list.template tiles<kTile>();
    if (tiles_ == 0) return;
    each_group([&](int here, int group) {
      for (int tile = 0; tile < 2; ++tile) {
        places_[tile * kGroups + group] = list_.place(tile * kGroups + group);
      }
      ahead_.at[here][0] = kAbsent;
    });
    machine_.meet();
    copy(0);
    machine_.commit();
  }

  ZERO_EXT_DEVICE std::int32_t tiles() const { return tiles_; }

  // Waits for a tile; they are taken one after another.
  ZERO_EXT_DEVICE void take(std::int32_t tile) {
    if constexpr (kStages == 2) {
      if (tile + 1 < tiles_) copy(tile + 1);
    } else {
      if (tile > 0) copy(tile);
    }
    machine_.commit();
    // The place after next is read now, and needed after the computation.
    each_group([&](int here, int group) {
      ahead_.at[here][0] = list_.place((tile + 2) * kGroups + group);
    });
    machine_.template wait<kStages - 1>();
    machine_.meet();
  }

  // Whatever was read of the tile is no longer needed by the running warp.
  ZERO_EXT_DEVICE void release(std::int32_t tile) {
    each_group([&](int here, int group) {
      places_[(tile + 2) % kRing * kGroups + group] = ahead_.at[here][0];
    });
    machine_.meet();
  }

  // Nothing is on its way any more, and the block's memory is as all its threads left it: also what
  // the caller began to copy for a list without blocks.
  ZERO_EXT_DEVICE void end() const {
    machine_.commit();
    machine_.template wait<0>();
    machine_.meet();
  }

  ZERO_EXT_DEVICE const T* first(std::int32_t tile) const { return matrix(tile, 0); }
  ZERO_EXT_DEVICE const T* second(std::int32_t tile) const { return matrix(tile, 1); }
  // [kTile]
  ZERO_EXT_DEVICE const float* numbers(std::int32_t tile, int which) const {
    return reinterpret_cast<const float*>(stage(tile) + 2 * kTileBytes + which * kNumberBytes);
  }
  // Which groups of 16 of the tile's rows the bands from the `band`th of the block's own on want.
  template <int kBands>
  ZERO_EXT_DEVICE void wanted(std::int32_t tile, int band, Wanted (&wanted)[kBands]) const {
    ZERO_EXT_UNROLL
    for (Wanted& each : wanted) each = 0;
    ZERO_EXT_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      const auto bits = static_cast<Wanted>(ring(tile)[group]);
      ZERO_EXT_UNROLL
      for (int i = 0; i < kBands; ++i) wanted[i] |= (bits >> (band + i) & 1) << group;
    }
  }
  // Where they are against a band whose first row is `first`.
  template <bool kKeysDown>
  ZERO_EXT_DEVICE Places<kKeysDown, kGroups> places(std::int32_t tile, std::int32_t first,
                                                    Wanted wanted) const {
    Places<kKeysDown, kGroups> found{first, {}, wanted};
    ZERO_EXT_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      found.starts[group] = ring(tile)[group] & ~kBandBits;
    }
    return found;
  }

 private:
  ZERO_EXT_DEVICE std::byte* stage(std::int32_t tile) const {
    return memory_ + tile % kStages * kStageBytes;
  }
  ZERO_EXT_DEVICE T* matrix(std::int32_t tile, int which) const {
    return reinterpret_cast<T*>(stage(tile) + which * kTileBytes);
  }

  // Calls visit(here, group) in the lane that keeps the place of a group of 16 rows.
  template <class Visit>
  ZERO_EXT_DEVICE void each_group(const Visit& visit) const {
    if (machine_.warp() != 0) return;
    each_lane([&](int here, int lane) {
      if (lane < kGroups) visit(here, lane);
    });
  }

  ZERO_EXT_DEVICE const std::int32_t* ring(std::int32_t tile) const {
    return places_ + tile % kRing * kGroups;
  }

  ZERO_EXT_DEVICE void copy(std::int32_t tile) const {
    const std::int32_t* places = ring(tile);
    const auto index = [&](int row) { return (places[row / 16] & ~kBandBits) + row % 16; };
    copy_rows<kDim>(machine_, first_, kTile, index, matrix(tile, 0));
    copy_rows<kDim>(machine_, second_, kTile, index, matrix(tile, 1));
    ZERO_EXT_UNROLL
    for (int which = 0; which < kNumbers; ++which) {
      const RowNumbers& from = numbers_[which];
      float* to = reinterpret_cast<float*>(stage(tile) + 2 * kTileBytes + which * kNumberBytes);
      each_lane([&](int, int lane) {
        for (int i = machine_.warp() * kWarpLanes + lane; i < kTile; i += machine_.threads()) {
          const std::int32_t row = index(i);
          const bool there = row < from.rows;
          machine_.template copy<4>(to + i, from.data + (there ? row : 0), there);
        }
      });
    }
  }

  const Machine& machine_;
  std::byte* memory_;
  std::int32_t* places_;  // of the tiles in the ring, see BlockList::place
  BlockList list_;
  Matrix<const T> first_;
  Matrix<const T> second_;
  RowNumbers numbers_[kNumbers == 0 ? 1 : kNumbers];
  std::int32_t tiles_ = 0;
  Registers<std::int32_t, 1> ahead_;
};

}  // namespace zero_ext::cuda
