// zero_ext::host_exchange_*: messages between the processes of one host. Exchanges are int64
// handles.
#include "../core/transport/cross_process_transport.h"

#include <memory>

#include "checks.h"
#include "op_registration.h"
#include "storage/handle_registry.h"

namespace zero_ext::ops {
namespace {

HandleRegistry<core::CrossProcessTransport>& registry() {
  return HandleRegistry<core::CrossProcessTransport>::of_process("host_exchange");
}

void cross_process_open(std::int64_t handle, const std::string& name, std::int64_t rank,
                        std::int64_t world_size, bool create) {
  STD_TORCH_CHECK(world_size >= 1 && world_size <= 1024,
                  "cross_process_open: world_size: expected 1 to 1024, got ", world_size,
                  ". Start at most 1024 ranks on a host.");
  STD_TORCH_CHECK(rank >= 0 && rank < world_size, "cross_process_open: rank: expected 0 to ",
                  world_size - 1, ", got ", rank, ". Pass the rank in the group.");
  registry().put(handle, std::make_shared<core::CrossProcessTransport>(
                             name, static_cast<int>(rank), static_cast<int>(world_size), create));
}

bool cross_process_connect(std::int64_t handle) { return registry().get(handle)->connect(); }

void cross_process_unlink(const std::string& name) { core::SharedMemorySegment::unlink(name); }

void cross_process_send(std::int64_t handle, std::int64_t peer, const Tensor& tensor,
                        std::int64_t tag) {
  check_layout(tensor, {"cross_process_send", "tensor"});
  registry().get(handle)->send(static_cast<int>(peer), bytes_of(tensor), tag, owner_of(tensor));
}

void cross_process_receive(std::int64_t handle, std::int64_t peer, const Tensor& tensor,
                           std::int64_t tag) {
  check_layout(tensor, {"cross_process_receive", "tensor"});
  registry().get(handle)->receive(static_cast<int>(peer), bytes_into(tensor), tag,
                                  owner_of(tensor));
}

void cross_process_wait(std::int64_t handle, std::int64_t peer, std::int64_t count, bool receiving,
                        double timeout_seconds) {
  const auto direction =
      receiving ? core::MessageDirection::kReceive : core::MessageDirection::kSend;
  registry().get(handle)->wait(static_cast<int>(peer), direction, static_cast<std::uint64_t>(count),
                               std::chrono::duration<double>(timeout_seconds));
}

void cross_process_abort(std::int64_t handle, const std::string& reason) {
  registry().get(handle)->abort(reason);
}

void cross_process_close(std::int64_t handle) { registry().remove(handle); }

}  // namespace

ZERO_EXT_OPS(CompositeExplicitAutograd) {
  ops("cross_process_open(int handle, str name, int rank, int world_size, bool create) -> ()",
      TORCH_BOX(&cross_process_open));
  ops("cross_process_connect(int handle) -> bool", TORCH_BOX(&cross_process_connect));
  ops("cross_process_unlink(str name) -> ()", TORCH_BOX(&cross_process_unlink));
  ops("cross_process_wait(int handle, int peer, int count, bool receiving, float timeout_seconds) "
      "-> ()",
      TORCH_BOX(&cross_process_wait));
  ops("cross_process_abort(int handle, str reason) -> ()", TORCH_BOX(&cross_process_abort));
  ops("cross_process_close(int handle) -> ()", TORCH_BOX(&cross_process_close));
}

ZERO_EXT_OPS(CPU) {
  ops("cross_process_send(int handle, int peer, Tensor tensor, int tag) -> ()",
      TORCH_BOX(&cross_process_send));
  ops("cross_process_receive(int handle, int peer, Tensor(a!) tensor, int tag) -> ()",
      TORCH_BOX(&cross_process_receive));
}

}  // namespace zero_ext::ops
