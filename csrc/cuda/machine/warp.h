// The 32 lanes that execute together. On a device each thread is one of them; on the host one call
// stands for all.
#pragma once

#include <bit>
#include <cstdint>

#include "../../core/portability.h"
#include "registers.h"

namespace zero_ext::cuda {

inline constexpr int kWarpLanes = 32;

#if defined(__CUDA_ARCH__)
inline constexpr int kLanesHere = 1;  // lanes that the running thread stands for
#else
inline constexpr int kLanesHere = kWarpLanes;
#endif

// Number of the running thread's lane `here`, counted from 0 to kLanesHere.
ZERO_EXT_HOST_DEVICE int lane_number(int here) {
#if defined(__CUDA_ARCH__)
  return here + static_cast<int>(threadIdx.x % kWarpLanes);
#else
  return here;
#endif
}

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

// One of two words, as one instruction: the compiler would else choose between what it loads them
// from, and load them one by one.
ZERO_EXT_HOST_DEVICE std::uint32_t choose(bool first, std::uint32_t one, std::uint32_t two) {
#if defined(__CUDA_ARCH__)
  std::uint32_t chosen;
  asm("{ .reg .pred p; setp.ne.u32 p, %3, 0; selp.b32 %0, %1, %2, p; }"
      : "=r"(chosen)
      : "r"(one), "r"(two), "r"(static_cast<std::uint32_t>(first)));
  return chosen;
#else
  return first ? one : two;
#endif
}

// One word of each lane.
struct LaneWords {
  std::uint32_t at[kLanesHere];
};

// What each lane gets of the one whose number differs in the bit `distance`.
ZERO_EXT_HOST_DEVICE LaneWords words_across(const LaneWords& words, int distance) {
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
ZERO_EXT_HOST_DEVICE LaneWords words_from(const LaneWords& words, const Source& source) {
#if defined(__CUDA_ARCH__)
  return {{__shfl_sync(0xFFFFFFFFU, words.at[0], source(lane_number(0)))}};
#else
  LaneWords result;
  for (int lane = 0; lane < kWarpLanes; ++lane) result.at[lane] = words.at[source(lane)];
  return result;
#endif
}

// Of all lanes, the halves of the warp first, then the quarters and so on; every lane gets it.
ZERO_EXT_HOST_DEVICE void sum_of_lanes(Registers<float, 1, kLanesHere>& values) {
  ZERO_EXT_UNROLL
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    LaneWords words;
    ZERO_EXT_UNROLL
    for (int here = 0; here < kLanesHere; ++here) {
      words.at[here] = std::bit_cast<std::uint32_t>(values.at[here][0]);
    }
    words = words_across(words, distance);
    ZERO_EXT_UNROLL
    for (int here = 0; here < kLanesHere; ++here) {
      values.at[here][0] += std::bit_cast<float>(words.at[here]);
    }
  }
}

// Of `lanes` neighbouring lanes, a power of two; every lane gets its group's.
ZERO_EXT_HOST_DEVICE void sum_of_group(double (&values)[kLanesHere], int lanes) {
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

// Of kGroup neighbouring lanes, a power of two; every lane gets those of its group.
template <int kGroup, int kCount>
ZERO_EXT_HOST_DEVICE void max_of_group(Registers<std::uint32_t, kCount, kLanesHere>& values) {
  ZERO_EXT_UNROLL
  for (int k = 0; k < kCount; ++k) {
    ZERO_EXT_UNROLL
    for (int distance = 1; distance < kGroup; distance *= 2) {
      LaneWords words;
      ZERO_EXT_UNROLL
      for (int here = 0; here < kLanesHere; ++here) words.at[here] = values.at[here][k];
      words = words_across(words, distance);
      ZERO_EXT_UNROLL
      for (int here = 0; here < kLanesHere; ++here) {
        std::uint32_t& own = values.at[here][k];
        own = words.at[here] > own ? words.at[here] : own;
      }
    }
  }
}

// Lanes see what the others wrote before.
ZERO_EXT_HOST_DEVICE void meet_in_warp() {
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
