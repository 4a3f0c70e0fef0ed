// The 32 lanes of a warp, which execute together, and what they hold in registers. On a device each
// thread is one of them; on the host one call stands for all.
#pragma once

#include "../../core/base/host_device.h"

namespace zero_ext::cuda {

inline constexpr int kWarpLanes = 32;

#if defined(__CUDA_ARCH__)
inline constexpr int kThreadLanes = 1;  // lanes that the running thread stands for
#else
inline constexpr int kThreadLanes = kWarpLanes;
#endif

// Number of the running thread's lane `local`, counted from 0 to kThreadLanes.
ZERO_EXT_HOST_DEVICE int lane_number(int local) {
#if defined(__CUDA_ARCH__)
  return local + static_cast<int>(threadIdx.x % kWarpLanes);
#else
  return local;
#endif
}

template <class T, int kCount>
struct Registers {
  T at[kThreadLanes][kCount];

  ZERO_EXT_HOST_DEVICE void fill(T value) {
    ZERO_EXT_UNROLL
    for (auto& lane : at) {
      ZERO_EXT_UNROLL
      for (T& each : lane) each = value;
    }
  }
};

// Calls visit(local, lane) for each lane of a warp: its index in Registers and its number.
template <class Visit>
ZERO_EXT_HOST_DEVICE void each_lane(const Visit& visit) {
  ZERO_EXT_UNROLL
  for (int local = 0; local < kThreadLanes; ++local) visit(local, lane_number(local));
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
