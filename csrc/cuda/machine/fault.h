// What a kernel does about arguments that only it can see, because the host does not wait for
// their values.
#pragma once

#include <cstdint>

#include "../../core/portability.h"

#if defined(__CUDA_ARCH__)
#include <cstdio>
#else
#include <stdexcept>
#include <string>
#endif

namespace zero_ext::cuda {

// Ends the kernel; later CUDA calls of the process fail, and the message is on its output.
ZERO_EXT_HOST_DEVICE void fail(const char* kernel, const char* argument, std::int64_t index,
                               const char* name, double value, const char* wanted) {
#if defined(__CUDA_ARCH__)
  ::printf("%s: %s of %s[%lld] is %g; it must be %s\n", kernel, name, argument,
           static_cast<long long>(index), value, wanted);
  __trap();
#else
  throw std::runtime_error(std::string(kernel) + ": " + name + " of " + argument + "[" +
                           std::to_string(index) + "] is " + std::to_string(value) +
                           "; it must be " + wanted);
#endif
}

}  // namespace zero_ext::cuda
