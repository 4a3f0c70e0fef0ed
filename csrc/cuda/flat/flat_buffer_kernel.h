// Copies, additions and sums of flat buffers as a warp of a grid runs them. See optimizer_kernel.h
// on kernels as objects.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "../../core/base/numeric_types.h"
#include "../../core/flat/flat_segments.h"
#include "../common/warp_tile.h"

namespace zero_ext::cuda {

using core::from_float;
using core::to_float;

// What happens between an element of the flat buffer and one of a tensor.
struct PackElement {
  static constexpr bool reads_flat = false;
  static constexpr bool reads_element = true;
  template <class Flat, class Element>
  static ZERO_EXT_HOST_DEVICE void move(Flat& flat, Element& element) {
    flat = from_float<Flat>(to_float(element));
  }
};
struct AccumulateElement {
  static constexpr bool reads_flat = true;
  static constexpr bool reads_element = true;
  template <class Flat, class Element>
  static ZERO_EXT_HOST_DEVICE void move(Flat& flat, Element& element) {
    flat = from_float<Flat>(to_float(flat) + to_float(element));
  }
};
struct UnpackElement {
  static constexpr bool reads_flat = true;
  static constexpr bool reads_element = false;
  template <class Flat, class Element>
  static ZERO_EXT_HOST_DEVICE void move(Flat& flat, Element& element) {
    element = from_float<Element>(to_float(flat));
  }
};

// Moves some tensors of one type. Their addresses travel with the launch, so nothing is copied to
// the device before it and a captured graph holds them.
template <class Flat, class Element, class Move>
struct MoveSegments {
  using Tile = WarpTileOf<2, Flat, Element>;
  static constexpr int kMax = 96;  // within the 4 KiB that arguments of a launch may take

  Flat* flat_pointers[kMax];
  Element* tensors[kMax];
  std::int64_t numels[kMax];
  std::int64_t first_tiles[kMax];  // tiles of all earlier tensors
  int count = 0;
  std::int64_t tiles = 0;

  void add(Flat* flat_pointer, Element* tensor, std::int64_t numel) {
    flat_pointers[count] = flat_pointer;
    tensors[count] = tensor;
    numels[count] = numel;
    first_tiles[count] = tiles;
    tiles += (numel + Tile::kElements - 1) / Tile::kElements;
    ++count;
  }

  ZERO_EXT_HOST_DEVICE void operator()(std::int64_t warp, std::int64_t warps) const {
    for (std::int64_t i = warp; i < tiles;) {
      const int segment = segment_of(i);
      Flat* const flat_pointer = flat_pointers[segment];
      Element* const tensor = tensors[segment];
      const std::int64_t numel = numels[segment];
      std::int64_t begin = (i - first_tiles[segment]) * Tile::kElements;
      if (is_aligned(flat_pointer) && is_aligned(tensor)) {
        for (; begin + Tile::kElements <= numel; begin += warps * Tile::kElements, i += warps) {
          full_tile(flat_pointer + begin, tensor + begin);
        }
      }
      // Of the same tensor; behind its end there is nothing, and the tile is another's.
      if (begin < numel) {
        const std::int64_t end = begin + Tile::kElements < numel ? begin + Tile::kElements : numel;
        for_each_strided(begin, end,
                         [&](int, std::int64_t at) { Move::move(flat_pointer[at], tensor[at]); });
        i += warps;
      }
    }
  }

  ZERO_EXT_HOST_DEVICE int segment_of(std::int64_t tile) const {
    int low = 0;
    int high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_tiles[middle] <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // Stores only what changed; the compiler then drops loads of what is not read.
  ZERO_EXT_HOST_DEVICE static void full_tile(Flat* flat_pointer, Element* tensor) {
    typename Tile::template Fragment<Flat> flat;
    typename Tile::template Fragment<Element> elements;
    if constexpr (Move::reads_flat) Tile::load(flat_pointer, flat);
    if constexpr (Move::reads_element) Tile::load(tensor, elements);
    each_lane([&](int local, int) {
      ZERO_EXT_UNROLL
      for (int k = 0; k < Tile::kPerLane; ++k) Move::move(flat.at[local][k], elements.at[local][k]);
    });
    if constexpr (Move::reads_element) {
      Tile::store(flat_pointer, flat);
    } else {
      Tile::store(tensor, elements);
    }
  }
};

// Calls visit(MoveSegments) until all segments of the element type have had their turn.
template <class Flat, class Element, class Move, class Visit>
void for_each_batch(const core::FlatSegments& segments, core::NumericType element_type,
                    const Visit& visit) {
  MoveSegments<Flat, Element, Move> batch;
  for (const core::FlatSegment& segment : segments.list) {
    if (segment.type != element_type || segment.numel == 0) continue;
    batch.add(reinterpret_cast<Flat*>(segments.flat) + segment.offset,
              static_cast<Element*>(segment.tensor), segment.numel);
    if (batch.count == batch.kMax) {
      visit(batch);
      batch.count = 0;
      batch.tiles = 0;
    }
  }
  if (batch.count > 0) visit(batch);
}

// target = cast(scale * (sources[0] + sources[1] + ...) [+ target]) in float32 and in list order;
// the target may be one of the sources.
template <class Target, class Source>
struct SumShards {
  using Tile = WarpTileOf<2, Target, Source>;
  static constexpr int kMax = 256;  // addresses that travel with the launch

  const Source* sources[kMax];
  int count;
  Target* target;
  std::int64_t numel;
  float scale;
  bool accumulate;
  bool aligned;

  static SumShards of(void* target, std::span<const void* const> shards, std::int64_t numel,
                      float scale, bool accumulate) {
    SumShards sum{};
    sum.count = static_cast<int>(shards.size());
    sum.target = static_cast<Target*>(target);
    sum.numel = numel;
    sum.scale = scale;
    sum.accumulate = accumulate;
    sum.aligned = is_aligned(target);
    for (std::size_t i = 0; i < shards.size(); ++i) {
      sum.sources[i] = static_cast<const Source*>(shards[i]);
      sum.aligned = sum.aligned && is_aligned(shards[i]);
    }
    return sum;
  }

  std::int64_t tiles() const { return (numel + Tile::kElements - 1) / Tile::kElements; }

  ZERO_EXT_HOST_DEVICE void operator()(std::int64_t warp, std::int64_t warps) const {
    for (std::int64_t begin = warp * Tile::kElements; begin < numel;
         begin += warps * Tile::kElements) {
      if (aligned && begin + Tile::kElements <= numel) {
        full_tile(begin);
      } else {
        const std::int64_t end = begin + Tile::kElements < numel ? begin + Tile::kElements : numel;
        for_each_strided(begin, end, [&](int, std::int64_t i) { element(i); });
      }
    }
  }

  ZERO_EXT_HOST_DEVICE void full_tile(std::int64_t begin) const {
    typename Tile::template Fragment<float> sums;
    add<true>(sources[0] + begin, sums);
    for (int k = 1; k < count; ++k) add<false>(sources[k] + begin, sums);
    typename Tile::template Fragment<Target> result;
    if (accumulate) Tile::load(target + begin, result);
    each_lane([&](int local, int) {
      ZERO_EXT_UNROLL
      for (int k = 0; k < Tile::kPerLane; ++k) finish(sums.at[local][k], result.at[local][k]);
    });
    Tile::store(target + begin, result);
  }

  template <bool First>
  static ZERO_EXT_HOST_DEVICE void add(const Source* source,
                                       typename Tile::template Fragment<float>& sums) {
    typename Tile::template Fragment<Source> own;
    Tile::load(source, own);
    each_lane([&](int local, int) {
      ZERO_EXT_UNROLL
      for (int k = 0; k < Tile::kPerLane; ++k) {
        const float value = to_float(own.at[local][k]);
        float& sum = sums.at[local][k];
        sum = First ? value : sum + value;
      }
    });
  }

  ZERO_EXT_HOST_DEVICE void element(std::int64_t i) const {
    float sum = to_float(sources[0][i]);
    for (int k = 1; k < count; ++k) sum += to_float(sources[k][i]);
    finish(sum, target[i]);
  }

  ZERO_EXT_HOST_DEVICE void finish(float sum, Target& result) const {
    const float scaled = sum * scale;
    result = from_float<Target>(accumulate ? scaled + to_float(result) : scaled);
  }
};

}  // namespace zero_ext::cuda
