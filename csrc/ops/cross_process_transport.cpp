// zero_ext::host_exchange_*: messages between the processes of one host. Exchanges are int64
// handles.
#include "../core/transport/cross_process_transport.h"

#include <memory>

#include "checks.h"
#include "storage/handle_registry.h"

namespace zero_ext::ops {
namespace {

HandleRegistry<core::CrossProcessTransport>& registry() {
  return HandleRegistry<core::CrossProcessTransport>::of_process("host_exchange");
}

std::shared_ptr<void> owner_of(const Tensor& tensor) { return std::make_shared<Tensor>(tensor); }

std::size_t nbytes(const Tensor& tensor) {
  return static_cast<std::size_t>(tensor.numel()) * tensor.element_size();
}

void host_exchange_open(std::int64_t handle, const std::string& name, std::int64_t rank,
                        std::int64_t world_size, bool create) {
  STD_TORCH_CHECK(world_size >= 1 && world_size <= 1024, "host_exchange_open: world_size is ",
                  world_size, "; 1 to 1024 wanted");
  STD_TORCH_CHECK(rank >= 0 && rank < world_size, "host_exchange_open: rank is ", rank, " of ",
                  world_size);
  registry().put(handle, std::make_shared<core::CrossProcessTransport>(
                             name, static_cast<int>(rank), static_cast<int>(world_size), create));
}

bool host_exchange_connect(std::int64_t handle) { return registry().get(handle)->connect(); }

void host_exchange_unlink(const std::string& name) { core::SharedMemorySegment::unlink(name); }

void host_exchange_send(std::int64_t handle, std::int64_t peer, const Tensor& tensor,
                        std::int64_t tag) {
  check_layout(tensor, {"host_exchange_send", "tensor"});
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  registry().get(handle)->send(static_cast<int>(peer), {data, nbytes(tensor)}, tag,
                               owner_of(tensor));
}

void host_exchange_receive(std::int64_t handle, std::int64_t peer, const Tensor& tensor,
                           std::int64_t tag) {
  check_layout(tensor, {"host_exchange_receive", "tensor"});
  auto* const data = static_cast<std::byte*>(tensor.mutable_data_ptr());
  registry().get(handle)->receive(static_cast<int>(peer), {data, nbytes(tensor)}, tag,
                                  owner_of(tensor));
}

void host_exchange_wait(std::int64_t handle, std::int64_t peer, std::int64_t count, bool receiving,
                        double timeout_seconds) {
  const auto direction =
      receiving ? core::MessageDirection::kReceive : core::MessageDirection::kSend;
  registry().get(handle)->wait(static_cast<int>(peer), direction, static_cast<std::uint64_t>(count),
                               std::chrono::duration<double>(timeout_seconds));
}

void host_exchange_give_up(std::int64_t handle, const std::string& reason) {
  registry().get(handle)->abort(reason);
}

void host_exchange_close(std::int64_t handle) { registry().remove(handle); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_ext, library) {
  library.def(
      "host_exchange_open(int handle, str name, int rank, int world_size, bool create) -> ()");
  library.def("host_exchange_connect(int handle) -> bool");
  library.def("host_exchange_unlink(str name) -> ()");
  library.def("host_exchange_send(int handle, int peer, Tensor tensor, int tag) -> ()");
  library.def("host_exchange_receive(int handle, int peer, Tensor(a!) tensor, int tag) -> ()");
  library.def(
      "host_exchange_wait(int handle, int peer, int count, bool receiving, float timeout_seconds) "
      "-> "
      "()");
  library.def("host_exchange_give_up(int handle, str reason) -> ()");
  library.def("host_exchange_close(int handle) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CompositeExplicitAutograd, library) {
  library.impl("host_exchange_open", TORCH_BOX(&host_exchange_open));
  library.impl("host_exchange_connect", TORCH_BOX(&host_exchange_connect));
  library.impl("host_exchange_unlink", TORCH_BOX(&host_exchange_unlink));
  library.impl("host_exchange_wait", TORCH_BOX(&host_exchange_wait));
  library.impl("host_exchange_give_up", TORCH_BOX(&host_exchange_give_up));
  library.impl("host_exchange_close", TORCH_BOX(&host_exchange_close));
}

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CPU, library) {
  library.impl("host_exchange_send", TORCH_BOX(&host_exchange_send));
  library.impl("host_exchange_receive", TORCH_BOX(&host_exchange_receive));
}

}  // namespace zero_ext::ops
