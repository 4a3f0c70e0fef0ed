// zero_ext::host_buffer, host_buffer_bytes and nan_filled_host_memory: host memory as tensors.
#include <cerrno>
#include <system_error>

#include "../../core/base/host_memory.h"
#include "../checks.h"

namespace zero_ext::ops {
namespace {

Tensor tensor_at(void* address, std::int64_t nbytes, const char* op) {
  STD_TORCH_CHECK(address != nullptr, op, ": nbytes: the kernel refused ", nbytes, " bytes (",
                  std::generic_category().message(errno), "). Free memory or ask for less.");
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  return torch::stable::from_blob(address, {nbytes}, {1}, cpu, ScalarType::Byte, &core::free_host);
}

Tensor host_buffer(std::int64_t nbytes) {
  STD_TORCH_CHECK(nbytes >= 0, "host_buffer: nbytes: expected at least 0, got ", nbytes,
                  ". Pass a size.");
  if (nbytes == 0) return torch::stable::empty({0}, ScalarType::Byte);
  return tensor_at(core::allocate_host(nbytes), nbytes, "host_buffer");
}

Tensor nan_filled_host_memory(std::int64_t nbytes) {
  STD_TORCH_CHECK(nbytes >= 0, "nan_filled_host_memory: nbytes: expected at least 0, got ", nbytes,
                  ". Pass a size.");
  if (nbytes == 0) return torch::stable::empty({0}, ScalarType::Byte);
  return tensor_at(core::map_nan_filled_host(nbytes), nbytes, "nan_filled_host_memory");
}

std::int64_t host_buffer_bytes() { return core::live_host_bytes(); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_ext, library) {
  library.def("host_buffer(int nbytes) -> Tensor");
  library.def("host_buffer_bytes() -> SymInt");
  library.def("nan_filled_host_memory(int nbytes) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CompositeExplicitAutograd, library) {
  library.impl("host_buffer", TORCH_BOX(&host_buffer));
  library.impl("host_buffer_bytes", TORCH_BOX(&host_buffer_bytes));
  library.impl("nan_filled_host_memory", TORCH_BOX(&nan_filled_host_memory));
}

}  // namespace zero_ext::ops
