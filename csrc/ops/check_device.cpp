// Module _C holds kernels of the CPU.
#include "checks.h"

namespace zero_ext::ops {

void check_device(const Tensor& tensor, const Argument& argument) {
  STD_TORCH_CHECK(tensor.is_cpu(), label(argument), "expected a tensor on the CPU, got one on ",
                  tensor.is_cuda() ? "a CUDA device" : "another device", ". Pass tensor.cpu().");
}

}  // namespace zero_ext::ops
