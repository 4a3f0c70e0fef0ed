// The 32 lanes that execute together. On a device each thread is one of them; on the host one call
// stands for all.
#pragma once

#include <cstdint>

#include "../../core/portability.h"

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
