// Recording of invalid values that only the device reads, because the host does not wait for them.
// A kernel records the first one and makes what follows harmless. The host raises later.
#pragma once

#include <cstdint>

#include "../../core/base/device_error.h"
#include "../../core/base/host_device.h"

namespace zero_ext::cuda {

using core::DeviceArgument;
using core::DeviceError;
using core::DeviceErrorRecord;
using core::DeviceField;
using core::DeviceOp;
using core::ExpectedValue;

// Sets the state of a record if it is `before`, for all threads of the device; returns what it was.
ZERO_EXT_HOST_DEVICE std::int64_t compare_exchange_state(DeviceErrorRecord* record,
                                                         std::int64_t before, std::int64_t after) {
#if defined(__CUDA_ARCH__)
  return static_cast<std::int64_t>(atomicCAS(reinterpret_cast<unsigned long long*>(&record->state),
                                             static_cast<unsigned long long>(before),
                                             static_cast<unsigned long long>(after)));
#else
  __atomic_compare_exchange_n(&record->state, &before, after, false, __ATOMIC_ACQ_REL,
                              __ATOMIC_ACQUIRE);
  return before;
#endif
}

// Between a change of the state and the error that it is about: who sees the one sees the other.
ZERO_EXT_HOST_DEVICE void order_error() {
#if defined(__CUDA_ARCH__)
  __threadfence();
#endif
}

// The first error stays until it is popped.
ZERO_EXT_HOST_DEVICE void record_error(DeviceErrorRecord* record, const DeviceError& error) {
  if (compare_exchange_state(record, DeviceErrorRecord::empty, DeviceErrorRecord::busy) !=
      DeviceErrorRecord::empty) {
    return;
  }
  record->error = error;
  order_error();
  compare_exchange_state(record, DeviceErrorRecord::busy, DeviceErrorRecord::complete);
}

// Whether a kernel has recorded an error that nobody took.
ZERO_EXT_HOST_DEVICE bool has_error(const DeviceErrorRecord* record) {
#if defined(__CUDA_ARCH__)
  return *static_cast<const volatile std::int64_t*>(&record->state) != DeviceErrorRecord::empty;
#else
  return __atomic_load_n(&record->state, __ATOMIC_ACQUIRE) != DeviceErrorRecord::empty;
#endif
}

// Moves the record into a tensor's memory, kDeviceErrorWords numbers, and empties it. An error that
// is being written stays for the next time.
struct PopDeviceError {
  DeviceErrorRecord* record;
  std::int64_t* target;

  ZERO_EXT_HOST_DEVICE void operator()(std::int64_t thread, std::int64_t) const {
    if (thread != 0) return;
    auto* const popped = reinterpret_cast<DeviceErrorRecord*>(target);
    *popped = {};
    if (compare_exchange_state(record, DeviceErrorRecord::complete, DeviceErrorRecord::busy) !=
        DeviceErrorRecord::complete) {
      return;
    }
    order_error();
    *popped = {DeviceErrorRecord::complete, record->error};
    order_error();
    compare_exchange_state(record, DeviceErrorRecord::busy, DeviceErrorRecord::empty);
  }
};

// Whether it holds for any thread of the block; on the host one call stands for the whole block.
ZERO_EXT_HOST_DEVICE bool any_of_block(bool own) {
#if defined(__CUDA_ARCH__)
  return __syncthreads_or(static_cast<int>(own)) != 0;
#else
  return own;
#endif
}

}  // namespace zero_ext::cuda
