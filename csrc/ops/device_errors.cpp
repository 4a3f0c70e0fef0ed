// zero_ext::pop_device_error_ and device_error_text: errors that the host learns of later.
#include <algorithm>
#include <cstring>

#include "device_error_arg_checks.h"
#include "op_registration.h"

namespace zero_ext::ops {
namespace {

// The CPU's ops raise their errors themselves.
void pop_device_error(const Tensor& record) {
  std::fill_n(check_device_error("pop_device_error_", record), core::kDeviceErrorWords, 0);
}

std::string device_error_text(const Tensor& record) {
  core::DeviceErrorRecord found;
  std::memcpy(&found, check_device_error("device_error_text", record), sizeof(found));
  return core::device_error_text(found);
}

}  // namespace

ZERO_EXT_OPS(CPU) {
  ops("pop_device_error_(Tensor(a!) record) -> ()", TORCH_BOX(&pop_device_error));
  ops("device_error_text(Tensor record) -> str", TORCH_BOX(&device_error_text));
}

}  // namespace zero_ext::ops
