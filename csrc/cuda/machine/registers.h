// What the lanes of a warp hold in registers. On a device a thread has its own lane's alone; the
// machine that emulates one has those of all 32.
#pragma once

#include "../../core/portability.h"

namespace zero_ext::cuda {

template <class T, int kCount, int kLanes>
struct Registers {
  T at[kLanes][kCount];

  ZERO_EXT_HOST_DEVICE void fill(T value) {
    ZERO_EXT_UNROLL
    for (auto& lane : at) {
      ZERO_EXT_UNROLL
      for (T& each : lane) each = value;
    }
  }
};

// Calls visit(here, lane) for each lane: its place in Registers and its number in the warp.
template <class Machine, class Visit>
ZERO_EXT_DEVICE void each_lane(const Machine& machine, const Visit& visit) {
  ZERO_EXT_UNROLL
  for (int here = 0; here < Machine::kLanes; ++here) visit(here, machine.lane(here));
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
