#if defined(__aarch64__)

#include "../simd/vector_neon.h"
#include "../simd/vector_scalar.h"
#include "kernel_table.h"

namespace zero_ext::core {

constinit const Kernels kNeonKernels = make_kernels<NeonVector>();

}  // namespace zero_ext::core

#endif
