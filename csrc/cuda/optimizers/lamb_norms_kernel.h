// What LAMB has besides the step (see optimizer_kernel.h): before it, the exact norms of the
// weights and updates of each segment, see squared_norm_kernel.h.
#pragma once

#include <cstdint>

#include "../../core/optimizers/lamb_norms.h"
#include "../../core/optimizers/lamb_rule.h"
#include "../norm/squared_norm_kernel.h"
#include "optimizer_kernel.h"

namespace zero_ext::cuda {

// A warp adds up neighboring chunks of the buffers, and a segment's sums to the others' when it
// comes to the next.
template <class Moment, class Grad>
struct AddLambSquares {
  using Norm = core::SquaredNorm<WarpVector, float, WarpTotal, 3>;
  using Tile = WarpTileOf<2, float, Moment, Grad>;
  static constexpr int kChunk = static_cast<int>(Norm::kGroup);
  static constexpr int kEntries = core::Superaccumulator::kEntries;

  // Of one warp: what a chunk holds of a segment, zeros behind it, and the segment's sums.
  struct Memory {
    alignas(kAccessBytes) float weights[kChunk];
    alignas(kAccessBytes) float updates[kChunk];
    std::int64_t totals[2 * kEntries];
  };

  const float* master;
  const Moment* exp_avg;
  const Moment* exp_avg_sq;
  const Grad* grad;
  std::int64_t numel;
  const core::LambSegment* segments;
  std::int64_t segment_count;
  std::int64_t* norms;  // [segment_count, 2, kEntries]
  bool aligned;         // buffers start at multiples of kAccessBytes

  static AddLambSquares of(const core::StepBuffers& buffers, std::int64_t numel,
                           const core::LambSegment* segments, std::int64_t segment_count,
                           std::int64_t* norms) {
    return {buffers.master,
            static_cast<const Moment*>(buffers.moments[0]),
            static_cast<const Moment*>(buffers.moments[1]),
            static_cast<const Grad*>(buffers.grad),
            numel,
            segments,
            segment_count,
            norms,
            is_aligned(buffers.master) && is_aligned(buffers.moments[0]) &&
                is_aligned(buffers.moments[1]) && is_aligned(buffers.grad)};
  }

  ZERO_EXT_HOST_DEVICE std::int64_t chunks() const { return (numel + kChunk - 1) / kChunk; }

  ZERO_EXT_FUNCTION void operator()(std::int64_t warp, std::int64_t warps, Memory& own) const {
    const std::int64_t each = (chunks() + warps - 1) / warps;
    const std::int64_t stop = (warp + 1) * each < chunks() ? (warp + 1) * each : chunks();
    clear(own);
    std::int64_t current = 0;
    for (std::int64_t chunk = warp * each; chunk < stop;) {
      std::int64_t i = first_ending_after(segments, segment_count, chunk * kChunk);
      if (i == segment_count) break;
      if (aligned && segments[i].begin <= chunk * kChunk) {
        const core::LambSegment segment = segments[i];
        const std::int64_t full_tile = segment.end / kChunk < stop ? segment.end / kChunk : stop;
        if (chunk < full_tile && i != current) flush(own, current);
        if (chunk < full_tile) current = i;
        for (; chunk < full_tile; ++chunk)
          add_full_chunk(chunk * kChunk, segment.coefficients, own);
        if (chunk == stop) break;
      }
      const std::int64_t begin = chunk * kChunk;
      const std::int64_t end = begin + kChunk;
      for (; i < segment_count && segments[i].begin < end; ++i) {
        const std::int64_t first = segments[i].begin > begin ? segments[i].begin : begin;
        const std::int64_t last = segments[i].end < end ? segments[i].end : end;
        if (first >= last) continue;
        if (i != current) flush(own, current);
        current = i;
        add_partial(first, static_cast<int>(last - first), segments[i].coefficients, own);
      }
      ++chunk;
    }
    flush(own, current);
  }

  // Calls visit(i) for each of the lanes' numbers below `count`.
  template <class Visit>
  static ZERO_EXT_FUNCTION void each_of_warp(int count, const Visit& visit) {
    for (int local = 0; local < kThreadLanes; ++local) {
      for (int i = lane_number(local); i < count; i += kWarpLanes) visit(i);
    }
  }

  static ZERO_EXT_FUNCTION void clear(Memory& own) {
    each_of_warp(2 * kEntries, [&own](int i) { own.totals[i] = 0; });
    sync_warp();
  }

  // A chunk that is one segment's.
  ZERO_EXT_FUNCTION void add_full_chunk(std::int64_t begin,
                                        const core::LambRule::Coefficients& coefficients,
                                        Memory& own) const {
    ZERO_EXT_UNROLL
    for (int first = 0; first < kChunk; first += Tile::kElements) {
      typename Tile::template Fragment<float> weights;
      typename Tile::template Fragment<float> updates;
      typename Tile::template Fragment<Moment> averages;
      typename Tile::template Fragment<Moment> squares;
      typename Tile::template Fragment<Grad> gradients;
      Tile::load(master + begin + first, weights);
      Tile::load(exp_avg + begin + first, averages);
      Tile::load(exp_avg_sq + begin + first, squares);
      Tile::load(grad + begin + first, gradients);
      each_lane([&](int local, int) {
        ZERO_EXT_UNROLL
        for (int k = 0; k < Tile::kPerLane; ++k) {
          updates.at[local][k] =
              direction(weights.at[local][k], averages.at[local][k], squares.at[local][k],
                        gradients.at[local][k], coefficients);
        }
      });
      Tile::store_shared(own.weights + first, weights);
      Tile::store_shared(own.updates + first, updates);
    }
    sum(own);
  }

  ZERO_EXT_FUNCTION void add_partial(std::int64_t first, int count,
                                     const core::LambRule::Coefficients& coefficients,
                                     Memory& own) const {
    each_of_warp(kChunk, [&](int k) {
      const std::int64_t i = first + k;
      own.weights[k] = k < count ? master[i] : 0.0F;
      own.updates[k] =
          k < count ? direction(master[i], exp_avg[i], exp_avg_sq[i], grad[i], coefficients) : 0.0F;
    });
    sum(own);
  }

  ZERO_EXT_FUNCTION static void sum(Memory& own) {
    sync_warp();
    WarpTotal weights{own.totals};
    WarpTotal updates{own.totals + kEntries};
    Norm::block(own.weights, kChunk, weights);
    Norm::block(own.updates, kChunk, updates);
    sync_warp();
  }

  static ZERO_EXT_HOST_DEVICE float direction(float weight, Moment exp_avg, Moment exp_avg_sq,
                                              Grad grad,
                                              const core::LambRule::Coefficients& coefficients) {
    using Scalar = core::ScalarVector;
    float values[1 + core::LambRule::kMoments] = {weight, Scalar::load(&exp_avg),
                                                  Scalar::load(&exp_avg_sq)};
    return core::LambRule::direction<Scalar>(values, Scalar::load(&grad), coefficients);
  }

  // Adds the sums to those of a segment, and begins new ones.
  ZERO_EXT_FUNCTION void flush(Memory& own, std::int64_t segment) const {
    sync_warp();
    each_of_warp(2, [&own](int k) { core::carry_limbs(own.totals + k * kEntries); });
    sync_warp();
    std::int64_t* const target = norms + segment * 2 * kEntries;
    each_of_warp(2 * kEntries, [&own, target](int i) {
      if (own.totals[i] != 0) add_shared(target + i, own.totals[i]);
    });
    sync_warp();
    clear(own);
  }
};

// Once all warps have added theirs: of each accumulator.
struct CarryLambNorms {
  std::int64_t* norms;
  std::int64_t count;

  ZERO_EXT_FUNCTION void operator()(std::int64_t thread, std::int64_t threads) const {
    for (std::int64_t i = thread; i < count; i += threads) {
      core::carry_limbs(norms + i * core::Superaccumulator::kEntries);
    }
  }
};

}  // namespace zero_ext::cuda
