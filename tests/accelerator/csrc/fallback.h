// Any op on the device: the CPU's kernel on the open aliases of the tensors.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace stand_in {

// Waits for the current stream, and for no other, then runs the op before it returns.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace stand_in
