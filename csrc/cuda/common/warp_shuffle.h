// Exchanges between the lanes of a warp, for all kernels. See warp_registers.h on lanes.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "../../core/base/host_device.h"
#include "warp_registers.h"

namespace zero_ext::cuda {

// What every lane gets of one value from each thread.
ZERO_EXT_HOST_DEVICE std::uint32_t max_of_warp(std::uint32_t value) {
#if defined(__CUDA_ARCH__)
  return __reduce_max_sync(0xFFFFFFFFU, value);
#else
  return value;
#endif
}

ZERO_EXT_HOST_DEVICE std::uint32_t min_of_warp(std::uint32_t value) {
#if defined(__CUDA_ARCH__)
  return __reduce_min_sync(0xFFFFFFFFU, value);
#else
  return value;
#endif
}

ZERO_EXT_HOST_DEVICE double sum_of_warp(double value) {
#if defined(__CUDA_ARCH__)
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFFU, value, distance);
  }
#endif
  return value;
}

// One word of each lane.
struct LaneWords {
  std::uint32_t at[kThreadLanes];
};

// What each lane gets of the one whose number differs in the bit `distance`.
ZERO_EXT_HOST_DEVICE LaneWords shuffle_xor(const LaneWords& words, int distance) {
#if defined(__CUDA_ARCH__)
  return {{__shfl_xor_sync(0xFFFFFFFFU, words.at[0], distance)}};
#else
  LaneWords result;
  for (int lane = 0; lane < kWarpLanes; ++lane) result.at[lane] = words.at[lane ^ distance];
  return result;
#endif
}

// What each lane gets of lane source(lane).
template <class Source>
ZERO_EXT_HOST_DEVICE LaneWords shuffle(const LaneWords& words, const Source& source) {
#if defined(__CUDA_ARCH__)
  return {{__shfl_sync(0xFFFFFFFFU, words.at[0], source(lane_number(0)))}};
#else
  LaneWords result;
  for (int lane = 0; lane < kWarpLanes; ++lane) result.at[lane] = words.at[source(lane)];
  return result;
#endif
}

// Combines each register with that of the lane whose number differs in the bit `distance`.
template <class T, int kCount, class Combine>
ZERO_EXT_HOST_DEVICE void combine_xor(Registers<T, kCount>& values, int distance,
                                      const Combine& combine) {
  static_assert(sizeof(T) == sizeof(std::uint32_t));
  ZERO_EXT_UNROLL
  for (int k = 0; k < kCount; ++k) {
    LaneWords words;
    each_lane([&](int local, int) {
      words.at[local] = std::bit_cast<std::uint32_t>(values.at[local][k]);
    });
    words = shuffle_xor(words, distance);
    each_lane([&](int local, int) {
      values.at[local][k] = combine(values.at[local][k], std::bit_cast<T>(words.at[local]));
    });
  }
}

// Of all lanes, the halves of the warp first, then the quarters and so on; every lane gets it.
ZERO_EXT_HOST_DEVICE void sum_of_lanes(Registers<float, 1>& values) {
  ZERO_EXT_UNROLL
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    combine_xor(values, distance, [](float own, float other) { return own + other; });
  }
}

// Of four neighboring lanes.
template <int kCount>
ZERO_EXT_HOST_DEVICE void max_of_quad(Registers<float, kCount>& values) {
  const auto highest = [](float own, float other) { return ::fmaxf(own, other); };
  combine_xor(values, 1, highest);
  combine_xor(values, 2, highest);
}
template <int kCount>
ZERO_EXT_HOST_DEVICE void sum_of_quad(Registers<float, kCount>& values) {
  const auto sum = [](float own, float other) { return own + other; };
  combine_xor(values, 1, sum);
  combine_xor(values, 2, sum);
}

// Every lane gets the bits that any lane has.
ZERO_EXT_HOST_DEVICE void or_of_warp(Registers<std::uint32_t, 1>& values) {
#if defined(__CUDA_ARCH__)
  values.at[0][0] = __reduce_or_sync(0xFFFFFFFFU, values.at[0][0]);
#else
  std::uint32_t any = 0;
  for (const auto& lane : values.at) any |= lane[0];
  values.fill(any);
#endif
}

// Of `lanes` neighboring lanes, a power of two; every lane gets its group's.
ZERO_EXT_HOST_DEVICE void sum_of_group(double (&values)[kThreadLanes], int lanes) {
  for (int distance = 1; distance < lanes; distance *= 2) {
#if defined(__CUDA_ARCH__)
    values[0] += __shfl_xor_sync(0xFFFFFFFFU, values[0], distance);
#else
    double sums[kWarpLanes];
    for (int lane = 0; lane < kWarpLanes; ++lane)
      sums[lane] = values[lane] + values[lane ^ distance];
    for (int lane = 0; lane < kWarpLanes; ++lane) values[lane] = sums[lane];
#endif
  }
}

// Of kGroup neighboring lanes, a power of two; every lane gets those of its group.
template <int kGroup, int kCount>
ZERO_EXT_HOST_DEVICE void max_of_group(Registers<std::uint32_t, kCount>& values) {
  ZERO_EXT_UNROLL
  for (int distance = 1; distance < kGroup; distance *= 2) {
    combine_xor(values, distance,
                [](std::uint32_t own, std::uint32_t other) { return other > own ? other : own; });
  }
}

// Lanes see what the others wrote before.
ZERO_EXT_HOST_DEVICE void sync_warp() {
#if defined(__CUDA_ARCH__)
  __syncwarp();
#endif
}

// Adds to memory that other threads add to: integers, so the order makes no difference.
ZERO_EXT_HOST_DEVICE void add_shared(std::int64_t* target, std::int64_t amount) {
#if defined(__CUDA_ARCH__)
  atomicAdd(reinterpret_cast<unsigned long long*>(target), static_cast<unsigned long long>(amount));
#else
  *target += amount;
#endif
}

}  // namespace zero_ext::cuda
