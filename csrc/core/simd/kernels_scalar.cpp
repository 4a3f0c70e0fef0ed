#include "kernel_table.h"
#include "vector_scalar.h"

namespace zero_ext::core {

constinit const Kernels kScalarKernels = make_kernels<ScalarVector>();

}  // namespace zero_ext::core
