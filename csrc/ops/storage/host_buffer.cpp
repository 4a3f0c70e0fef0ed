// zero_ext::host_buffer, host_buffer_bytes and nan_filled_host_memory: host memory as tensors.
#include <cerrno>
#include <system_error>

#include "../../core/base/host_memory.h"
#include "../checks.h"
#include "../op_registration.h"

namespace zero_ext::ops {
namespace {

Tensor tensor_of(const char* op, std::int64_t nbytes, void* (*allocate)(std::int64_t)) {
  STD_TORCH_CHECK(nbytes >= 0, op, ": nbytes: expected at least 0, got ", nbytes, ". Pass a size.");
  if (nbytes == 0) return torch::stable::empty({0}, ScalarType::Byte);
  void* const address = allocate(nbytes);
  STD_TORCH_CHECK(address != nullptr, op, ": nbytes: the kernel refused ", nbytes, " bytes (",
                  std::generic_category().message(errno), "). Free memory or ask for less.");
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  return torch::stable::from_blob(address, {nbytes}, {1}, cpu, ScalarType::Byte, &core::free_host);
}

Tensor host_buffer(std::int64_t nbytes) {
  return tensor_of("host_buffer", nbytes, &core::allocate_host);
}

Tensor nan_filled_host_memory(std::int64_t nbytes) {
  return tensor_of("nan_filled_host_memory", nbytes, &core::map_nan_filled_host);
}

std::int64_t host_buffer_bytes() { return core::live_host_bytes(); }

}  // namespace

ZERO_EXT_OPS(CompositeExplicitAutograd) {
  ops("host_buffer(int nbytes) -> Tensor", TORCH_BOX(&host_buffer));
  ops("host_buffer_bytes() -> SymInt", TORCH_BOX(&host_buffer_bytes));
  ops("nan_filled_host_memory(int nbytes) -> Tensor", TORCH_BOX(&nan_filled_host_memory));
}

}  // namespace zero_ext::ops
