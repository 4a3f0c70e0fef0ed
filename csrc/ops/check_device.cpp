// Module _C holds kernels of the CPU.
#include "checks.h"

namespace zero_ext::ops {

void check_device(const Tensor& tensor, const Argument& argument) {
  STD_TORCH_CHECK(tensor.is_cpu(), label(argument), "is on ",
                  tensor.is_cuda() ? "a CUDA device" : "a device other than the CPU",
                  "; it must be on the CPU: pass tensor.cpu()");
}

}  // namespace zero_ext::ops
