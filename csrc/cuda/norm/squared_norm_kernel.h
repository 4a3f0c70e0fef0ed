// Exact sum of squares and count of non-finite elements, warp by warp, with the formula of the CPU.
//
// Every block of elements is summed exactly and added to integers, so the result is the same bit
// for bit for every grid, device and split, and equals the CPU's.
#pragma once

#include <cstdint>
#include <limits>

#include "../../core/norm/squared_norm_kernel.h"
#include "../../core/norm/superaccumulator_formula.h"
#include "../common/error_recording.h"
#include "../common/warp_vector.h"

namespace zero_ext::cuda {

// A Superaccumulator's entries that one warp's lanes share. They take 2^23 additions before they
// have to be carried: with eight warps a block, elements of very different magnitudes that fill
// the memory of any device stay below.
struct WarpTotal {
  std::int64_t* entries;  // [Superaccumulator::kEntries]

  // Of a value that all lanes hold.
  ZERO_EXT_FUNCTION void add(double value) {
    if (lane_number(0) != 0) return;
    LaneTotal{entries}.add(value);
  }

  template <class Visit>
  ZERO_EXT_FUNCTION void for_each(std::int64_t count, const Visit& visit) {
    LaneTotal own{entries};
    for (int local = 0; local < kThreadLanes; ++local) {
      for (std::int64_t i = lane_number(local); i < count; i += kWarpLanes) visit(i, own);
    }
  }

  // Of a value that is one lane's own.
  struct LaneTotal {
    std::int64_t* entries;
    ZERO_EXT_FUNCTION void add(double value) {
      std::int64_t* const target = entries;
      core::split_into_limbs(
          value, [target](int limb, std::int64_t amount) { add_shared(target + limb, amount); });
    }
    ZERO_EXT_FUNCTION void add_non_finite(std::int64_t count) {
      add_shared(entries + core::Superaccumulator::kLimbs, count);
    }
  };
};

template <class T>
struct AddSquares {
  // A fourth accumulator would need more registers than leave two blocks on a processor.
  using Norm = core::SquaredNorm<WarpVector, T, WarpTotal, 3>;
  static constexpr int kEntries = core::Superaccumulator::kEntries;

  const T* values;
  std::int64_t count;
  std::int64_t head;  // elements before the first aligned one
  std::int64_t* accumulator;

  static AddSquares of(const void* values, std::int64_t count, std::int64_t* accumulator) {
    const auto past = reinterpret_cast<std::uintptr_t>(values) % kAccessBytes;
    const auto head = static_cast<std::int64_t>((kAccessBytes - past) % kAccessBytes / sizeof(T));
    return {static_cast<const T*>(values), count, head < count ? head : count, accumulator};
  }

  std::int64_t blocks() const { return (count - head) / Norm::kBlock; }

  // `own` is memory of this warp alone.
  ZERO_EXT_FUNCTION void operator()(std::int64_t warp, std::int64_t warps,
                                    std::int64_t* own) const {
    for (int local = 0; local < kThreadLanes; ++local) {
      for (int i = lane_number(local); i < kEntries; i += kWarpLanes) own[i] = 0;
    }
    sync_warp();
    WarpTotal total{own};
    const std::int64_t full = (count - head) / Norm::kBlock;
    for (std::int64_t i = warp; i < full; i += warps) {
      Norm::block(values + head + i * Norm::kBlock, Norm::kBlock, total);
    }
    if (warp == 0) {
      const std::int64_t done = head + full * Norm::kBlock;
      Norm::one_by_one(values, head, total);
      Norm::one_by_one(values + done, count - done, total);
    }
    sync_warp();
    if (lane_number(0) == 0) core::carry_limbs(own);
    sync_warp();
    for (int local = 0; local < kThreadLanes; ++local) {
      for (int i = lane_number(local); i < kEntries; i += kWarpLanes) {
        if (own[i] != 0) add_shared(accumulator + i, own[i]);
      }
    }
  }
};

// Once all warps have added theirs.
struct CarryAccumulator {
  std::int64_t* accumulator;
  ZERO_EXT_FUNCTION void operator()(std::int64_t thread, std::int64_t) const {
    if (thread == 0) core::carry_limbs(accumulator);
  }
};

// The sum that the accumulator holds, in a double; NaN for a negative one, which is recorded.
struct ReadAccumulator {
  DeviceErrorRecord* errors;
  const std::int64_t* accumulator;
  double* result;
  ZERO_EXT_FUNCTION void operator()(std::int64_t thread, std::int64_t) const {
    constexpr int kHighest = core::Superaccumulator::kLimbs - 1;
    if (thread != 0 || core::rounded_sum(accumulator, *result)) return;
    *result = std::numeric_limits<double>::quiet_NaN();
    record_error(errors, {DeviceOp::squared_norm_value, DeviceArgument::accumulator, kHighest,
                          DeviceField::entry, static_cast<double>(accumulator[kHighest]),
                          ExpectedValue::not_negative_sum});
  }
};

}  // namespace zero_ext::cuda
