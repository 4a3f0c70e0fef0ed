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

// Begins to copy `count` rows to shared memory, row i of the tile from row index(i);
// zeros where there is none, and in columns beyond the matrix's.
template <int kDim, class ThreadBlock, class T, class Index>
ZERO_EXT_DEVICE void copy_rows(const ThreadBlock& thread_block, const Matrix<const T>& from,
                               int count, const Index& index, T* tile) {
  using Rows = TileRows<T, kDim>;
  each_lane([&](int, int lane) {
    for (int i = thread_block.warp() * kWarpLanes + lane; i < count * Rows::kChunks;
         i += thread_block.threads()) {
      const int row = i / Rows::kChunks;
      const int column = i % Rows::kChunks * Rows::kChunk;
      const std::int32_t source = index(row);
      const bool there = source < from.rows && column < from.dim;
      const T* address = there ? from.data + source * from.row_stride + column : from.data;
      thread_block.template copy<16>(tile + row * Rows::kStride + column, address, there);
    }
  });
}

// Numbers of the rows of a matrix: a float each.
struct RowScalars {
  const float* data;
  std::int32_t rows;
};

// Tiles of two matrices with the same rows, and with kScalars scalars of each row.
template <class ThreadBlock, class T, int kDim, int kTile, int kStages, int kScalars>
class TileLoader {
 public:
  static_assert(kTile % 16 == 0 && (kStages == 1 || kStages == 2));
  static constexpr int kGroups = kTile / 16;
  static constexpr int kTileBytes = TileRows<T, kDim>::bytes(kTile);
  static constexpr int kScalarBytes = kTile * static_cast<int>(sizeof(float));
  static constexpr int kStageBytes = 2 * kTileBytes + kScalars * kScalarBytes;
  static constexpr int kRing = 4;  // tiles whose positions are known
  static constexpr int kBytes = kStages * kStageBytes + kRing * kGroups * 4;

  ZERO_EXT_DEVICE TileLoader(const ThreadBlock& thread_block, std::byte* memory)
      : thread_block_(thread_block),
        memory_(memory),
        positions_(reinterpret_cast<std::int32_t*>(memory + kStages * kStageBytes)) {}

  // The next list and matrices. What the caller began to copy before is there with the first
  // tile. Nothing happens where the list has no blocks.
  ZERO_EXT_DEVICE void begin(const BlockList& list, const Matrix<const T>& first,
                             const Matrix<const T>& second,
                             const RowScalars (&scalars)[kScalars == 0 ? 1 : kScalars]) {
    list_ = list;
    first_ = first;
    second_ = second;
    ZERO_EXT_UNROLL
    for (int i = 0; i < kScalars; ++i) scalars_[i] = scalars[i];
    tiles_ = list.template tiles<kTile>();
    if (tiles_ == 0) return;
    each_group([&](int local, int group) {
      for (int tile = 0; tile < 2; ++tile) {
        positions_[tile * kGroups + group] = list_.position(tile * kGroups + group);
      }
      ahead_.at[local][0] = kAbsent;
    });
    thread_block_.sync();
    copy(0);
    thread_block_.commit();
  }

  ZERO_EXT_DEVICE std::int32_t tiles() const { return tiles_; }

  // Waits for a tile; they are taken one after another.
  ZERO_EXT_DEVICE void acquire(std::int32_t tile) {
    if constexpr (kStages == 2) {
      if (tile + 1 < tiles_) copy(tile + 1);
    } else {
      if (tile > 0) copy(tile);
    }
    thread_block_.commit();
    // The position after the next one is read now and needed after the computation.
    each_group([&](int local, int group) {
      ahead_.at[local][0] = list_.position((tile + 2) * kGroups + group);
    });
    thread_block_.template wait<kStages - 1>();
    thread_block_.sync();
  }

  // Whatever was read of the tile is no longer needed by the running warp.
  ZERO_EXT_DEVICE void release(std::int32_t tile) {
    each_group([&](int local, int group) {
      positions_[(tile + 2) % kRing * kGroups + group] = ahead_.at[local][0];
    });
    thread_block_.sync();
  }

  // Nothing is on its way any more, and the block's memory is as all its threads left it: also what
  // the caller began to copy for a list without blocks.
  ZERO_EXT_DEVICE void end() const {
    thread_block_.commit();
    thread_block_.template wait<0>();
    thread_block_.sync();
  }

  ZERO_EXT_DEVICE const T* first(std::int32_t tile) const { return matrix(tile, 0); }
  ZERO_EXT_DEVICE const T* second(std::int32_t tile) const { return matrix(tile, 1); }
  // [kTile]
  ZERO_EXT_DEVICE const float* scalars(std::int32_t tile, int which) const {
    return reinterpret_cast<const float*>(stage(tile) + 2 * kTileBytes + which * kScalarBytes);
  }
  // Which groups of 16 of the tile's rows the bands from the `band`th of the block's own on attend
  // to.
  template <int kBands>
  ZERO_EXT_DEVICE void masks(std::int32_t tile, int band, GroupMask (&masks)[kBands]) const {
    ZERO_EXT_UNROLL
    for (GroupMask& each : masks) each = 0;
    ZERO_EXT_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      const auto bits = static_cast<GroupMask>(ring(tile)[group]);
      ZERO_EXT_UNROLL
      for (int i = 0; i < kBands; ++i) masks[i] |= (bits >> (band + i) & 1) << group;
    }
  }
  // Where they are against a band whose first row is `first`.
  template <bool kKeysAreRows>
  ZERO_EXT_DEVICE TilePositions<kKeysAreRows, kGroups> positions(std::int32_t tile,
                                                                 std::int32_t first,
                                                                 GroupMask masks) const {
    TilePositions<kKeysAreRows, kGroups> found{first, {}, masks};
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

  // Calls visit(local, group) in the lane that holds the position of a group of 16 rows.
  template <class Visit>
  ZERO_EXT_DEVICE void each_group(const Visit& visit) const {
    if (thread_block_.warp() != 0) return;
    each_lane([&](int local, int lane) {
      if (lane < kGroups) visit(local, lane);
    });
  }

  ZERO_EXT_DEVICE const std::int32_t* ring(std::int32_t tile) const {
    return positions_ + tile % kRing * kGroups;
  }

  ZERO_EXT_DEVICE void copy(std::int32_t tile) const {
    const std::int32_t* positions = ring(tile);
    const auto index = [&](int row) { return (positions[row / 16] & ~kBandBits) + row % 16; };
    copy_rows<kDim>(thread_block_, first_, kTile, index, matrix(tile, 0));
    copy_rows<kDim>(thread_block_, second_, kTile, index, matrix(tile, 1));
    ZERO_EXT_UNROLL
    for (int which = 0; which < kScalars; ++which) {
      const RowScalars& from = scalars_[which];
      float* to = reinterpret_cast<float*>(stage(tile) + 2 * kTileBytes + which * kScalarBytes);
      each_lane([&](int, int lane) {
        for (int i = thread_block_.warp() * kWarpLanes + lane; i < kTile;
             i += thread_block_.threads()) {
          const std::int32_t row = index(i);
          const bool there = row < from.rows;
          thread_block_.template copy<4>(to + i, from.data + (there ? row : 0), there);
        }
      });
    }
  }

  const ThreadBlock& thread_block_;
  std::byte* memory_;
  std::int32_t* positions_;  // of the tiles in the ring, see BlockList::position
  BlockList list_;
  Matrix<const T> first_;
  Matrix<const T> second_;
  RowScalars scalars_[kScalars == 0 ? 1 : kScalars];
  std::int32_t tiles_ = 0;
  Registers<std::int32_t, 1> ahead_;
};

}  // namespace zero_ext::cuda
