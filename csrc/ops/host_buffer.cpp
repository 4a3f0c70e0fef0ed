// zero_ext::host_buffer and host_buffer_bytes: huge-page host memory as tensors.
#include <cerrno>
#include <system_error>

#include "../core/host_memory.h"
#include "checks.h"

namespace zero_ext::ops {
namespace {

Tensor host_buffer(std::int64_t nbytes) {
  STD_TORCH_CHECK(nbytes >= 0, "host_buffer: nbytes is ", nbytes, "; it must not be negative");
  if (nbytes == 0) return torch::stable::empty({0}, ScalarType::Byte);
  void* const address = core::allocate_host(nbytes);
  STD_TORCH_CHECK(address != nullptr, "host_buffer: the kernel refused ", nbytes,
                  " bytes: ", std::generic_category().message(errno),
                  "; ask for less or free memory");
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  return torch::stable::from_blob(address, {nbytes}, {1}, cpu, ScalarType::Byte, &core::free_host);
}

std::int64_t host_buffer_bytes() { return core::live_host_bytes(); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_ext, library) {
  library.def("host_buffer(int nbytes) -> Tensor");
  library.def("host_buffer_bytes() -> SymInt");
}

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CompositeExplicitAutograd, library) {
  library.impl("host_buffer", TORCH_BOX(&host_buffer));
  library.impl("host_buffer_bytes", TORCH_BOX(&host_buffer_bytes));
}

}  // namespace zero_ext::ops
