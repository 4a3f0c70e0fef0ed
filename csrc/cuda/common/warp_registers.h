// The 32 lanes of a warp, which execute together, and what they hold in registers. On a device each
// thread is one of them; on the host one call stands for all.
#pragma once

#include "../../core/base/host_device.h"

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

template <class T, int kCount>
struct Registers {
  T at[kLanesHere][kCount];

  ZERO_EXT_HOST_DEVICE void fill(T value) {
    ZERO_EXT_UNROLL
    for (auto& lane : at) {
      ZERO_EXT_UNROLL
      for (T& each : lane) each = value;
    }
  }
};

// Calls visit(here, lane) for each lane of a warp: its place in Registers and its number.
template <class Visit>
ZERO_EXT_HOST_DEVICE void each_lane(const Visit& visit) {
  ZERO_EXT_UNROLL
  for (int here = 0; here < kLanesHere; ++here) visit(here, lane_number(here));
}

// Calls visit.operator()<i>() for every i below kCount, each with code of its own.
template <int kCount, int kNext = 0, class Visit>
ZERO_EXT_DEVICE void each_constant(const Visit& visit) {
  if constexpr (kNext < kCount) {
    visit.template operator()<kNext>();
    each_constant<kCount, kNext + 1>(visit);
  }
}

}  // namespace zero_ext::cuda
