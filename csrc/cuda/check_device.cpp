// Module _C_cuda holds kernels of CUDA devices; its ops first make their first tensor's device the
// current one.
#include <torch/csrc/stable/accelerator.h>

#include "../ops/checks.h"

namespace zero_ext::ops {

void check_device(const Tensor& tensor, const Argument& argument) {
  const auto current = torch::stable::accelerator::getCurrentDeviceIndex();
  STD_TORCH_CHECK(tensor.is_cuda(), label(argument),
                  "is not on a CUDA device; it must be on cuda:", current,
                  " like the op's first tensor: pass tensor.to('cuda:", current, "')");
  STD_TORCH_CHECK(tensor.get_device_index() == current, label(argument),
                  "is on cuda:", tensor.get_device_index(),
                  "; all tensors must be on cuda:", current, ", where the op's first one is");
}

}  // namespace zero_ext::ops
