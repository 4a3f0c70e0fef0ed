#include "../simd/vector_scalar.h"
#include "kernel_table.h"

namespace zero_ext::core {

constinit const Kernels kScalarKernels = make_kernels<ScalarVector>();

}  // namespace zero_ext::core
