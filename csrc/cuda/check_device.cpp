// Module _C_cuda holds kernels of CUDA devices; its ops first make their first tensor's device the
// current one.
#include <torch/csrc/stable/accelerator.h>

#include "../ops/checks.h"

namespace zero_ext::ops {

void check_device(const Tensor& tensor, const Argument& argument) {
  const auto current = torch::stable::accelerator::getCurrentDeviceIndex();
  STD_TORCH_CHECK(
      tensor.is_cuda(), label(argument), "expected a tensor on cuda:", current,
      " like the op's first one, got one on another kind of device. Pass tensor.to('cuda:", current,
      "').");
  STD_TORCH_CHECK(
      tensor.get_device_index() == current, label(argument), "expected a tensor on cuda:", current,
      " like the op's first one, got one on cuda:", tensor.get_device_index(), ". Move it there.");
}

}  // namespace zero_ext::ops
