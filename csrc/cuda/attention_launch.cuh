// Runs an attention kernel: one block of threads for each of its pieces, with the shared memory
// that it needs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "attention_machine.cuh"
#include "attention_shape.h"
#include "launch.cuh"

namespace zero_ext::cuda {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Shape::kMostThreads)
    run_attention(const __grid_constant__ Kernel kernel) {
  extern __shared__ __align__(16) std::byte memory[];
  kernel(DeviceMachine(memory));
}

template <class Kernel>
void launch_attention(const char* op, const Kernel& kernel) {
  const std::int64_t blocks = kernel.blocks();
  if (blocks == 0) return;
  STD_TORCH_CHECK(blocks <= INT32_MAX, op, ": the layout has ", blocks,
                  " rows or columns of blocks over all batches and heads; a launch takes at most ",
                  INT32_MAX, ": split the batch");
  constexpr int most =
      Kernel::template shared_bytes<DeviceMachine>(Kernel::Shape::kMostRows);
  static_assert(most <= kMostSharedBytes);
  const Launcher launcher(op);
  check(op, cudaFuncSetAttribute(run_attention<Kernel>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, most));
  const int rows = kernel.rows();
  run_attention<Kernel>
      <<<static_cast<unsigned>(blocks), rows / kWarpRows * kWarpLanes,
         Kernel::template shared_bytes<DeviceMachine>(rows), launcher.stream>>>(kernel);
  check(op, cudaGetLastError());
}

}  // namespace zero_ext::cuda
