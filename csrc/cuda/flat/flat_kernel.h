// Copies, additions and sums of flat buffers as a thread of a grid runs them. See step_kernel.h on
// kernels as objects.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "../../core/flat_pieces.h"
#include "../../core/numeric_types.h"
#include "../machine/vector_access.h"

namespace zero_ext::cuda {

using core::from_float;
using core::to_float;

// What happens between an element of the flat buffer and one of a tensor.
struct PackElement {
  template <class Flat, class Element>
  static ZERO_EXT_HOST_DEVICE void move(Flat& flat, Element& element) {
    flat = from_float<Flat>(to_float(element));
  }
};
struct AccumulateElement {
  template <class Flat, class Element>
  static ZERO_EXT_HOST_DEVICE void move(Flat& flat, Element& element) {
    flat = from_float<Flat>(to_float(flat) + to_float(element));
  }
};
struct UnpackElement {
  template <class Flat, class Element>
  static ZERO_EXT_HOST_DEVICE void move(Flat& flat, Element& element) {
    element = from_float<Element>(to_float(flat));
  }
};

// Moves some tensors of one type. Their addresses travel with the launch, so nothing is copied to
// the device before it and a captured graph holds them.
template <class Flat, class Element, class Move>
struct MovePieces {
  static constexpr int kMost = 96;  // within the 4 KiB that arguments of a launch may take

  Flat* places[kMost];
  Element* tensors[kMost];
  std::int64_t numels[kMost];
  std::int64_t first_packs[kMost];  // packs of all earlier tensors
  int count = 0;
  std::int64_t packs = 0;

  void add(Flat* place, Element* tensor, std::int64_t numel) {
    places[count] = place;
    tensors[count] = tensor;
    numels[count] = numel;
    first_packs[count] = packs;
    packs += (numel + kPackElements - 1) / kPackElements;
    ++count;
  }

  ZERO_EXT_HOST_DEVICE void operator()(std::int64_t thread, std::int64_t threads) const {
    for (std::int64_t i = thread; i < packs; i += threads) {
      const int piece = piece_of(i);
      run(places[piece], tensors[piece], numels[piece], (i - first_packs[piece]) * kPackElements);
    }
  }

  ZERO_EXT_HOST_DEVICE int piece_of(std::int64_t pack) const {
    int low = 0;
    int high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_packs[middle] <= pack) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

  ZERO_EXT_HOST_DEVICE static void run(Flat* place, Element* tensor, std::int64_t numel,
                                       std::int64_t begin) {
    if (begin + kPackElements <= numel && is_aligned(place) && is_aligned(tensor)) {
      Pack<Flat> flat = load_pack(place + begin);
      Pack<Element> element = load_pack(tensor + begin);
      ZERO_EXT_UNROLL
      for (int k = 0; k < kPackElements; ++k) Move::move(flat.values[k], element.values[k]);
      store(place + begin, tensor + begin, flat, element);
      return;
    }
    const std::int64_t end = begin + kPackElements < numel ? begin + kPackElements : numel;
    for (std::int64_t i = begin; i < end; ++i) Move::move(place[i], tensor[i]);
  }

  // Only what changed; the compiler then drops loads of what is not read.
  ZERO_EXT_HOST_DEVICE static void store(Flat* place, Element* tensor, const Pack<Flat>& flat,
                                         const Pack<Element>& element) {
    if constexpr (std::is_same_v<Move, UnpackElement>) {
      store_pack(tensor, element);
    } else {
      store_pack(place, flat);
    }
  }
};

// Calls visit(MovePieces) until all pieces of the element type have had their turn.
template <class Flat, class Element, class Move, class Visit>
void for_each_batch(const core::Pieces& pieces, core::NumericType element_type,
                    const Visit& visit) {
  MovePieces<Flat, Element, Move> batch;
  for (const core::Piece& piece : pieces.list) {
    if (piece.type != element_type || piece.numel == 0) continue;
    batch.add(reinterpret_cast<Flat*>(pieces.flat) + piece.offset,
              static_cast<Element*>(piece.tensor), piece.numel);
    if (batch.count == batch.kMost) {
      visit(batch);
      batch.count = 0;
      batch.packs = 0;
    }
  }
  if (batch.count > 0) visit(batch);
}

// target = cast(scale * (sources[0] + sources[1] + ...) [+ target]) in float32 and in list order;
// the target may be one of the sources.
template <class Target, class Source>
struct SumShards {
  static constexpr int kMost = 256;  // addresses that travel with the launch

  const Source* sources[kMost];
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

  std::int64_t packs() const { return (numel + kPackElements - 1) / kPackElements; }

  ZERO_EXT_HOST_DEVICE void operator()(std::int64_t thread, std::int64_t threads) const {
    for (std::int64_t begin = thread * kPackElements; begin < numel;
         begin += threads * kPackElements) {
      if (aligned && begin + kPackElements <= numel) {
        whole(begin);
      } else {
        for (std::int64_t i = begin; i < numel && i < begin + kPackElements; ++i) element(i);
      }
    }
  }

  ZERO_EXT_HOST_DEVICE void whole(std::int64_t begin) const {
    float sums[kPackElements];
    add<true>(load_pack(sources[0] + begin), sums);
    for (int k = 1; k < count; ++k) add<false>(load_pack(sources[k] + begin), sums);
    Pack<Target> result;
    if (accumulate) result = load_pack(target + begin);
    ZERO_EXT_UNROLL
    for (int i = 0; i < kPackElements; ++i) finish(sums[i], result.values[i]);
    store_pack(target + begin, result);
  }

  template <bool First>
  static ZERO_EXT_HOST_DEVICE void add(const Pack<Source>& pack, float (&sums)[kPackElements]) {
    ZERO_EXT_UNROLL
    for (int i = 0; i < kPackElements; ++i) {
      const float value = to_float(pack.values[i]);
      sums[i] = First ? value : sums[i] + value;
    }
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
