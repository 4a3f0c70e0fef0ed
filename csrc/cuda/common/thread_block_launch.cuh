// Launches of kernels that whole blocks of threads run: called with the thread block, see
// device_thread_block.cuh, they define how many blocks, threads and bytes of shared memory they
// use.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device_thread_block.cuh"
#include "launch.cuh"

namespace zero_ext::cuda {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, min_blocks<Kernel>())
    run_blocks(const __grid_constant__ Kernel kernel) {
  static_assert(Kernel::kSharedBytes <= kSharedBytes);
  if constexpr (Kernel::kSharedBytes > 0) {
    __shared__ __align__(16) std::byte memory[Kernel::kSharedBytes];
    kernel(DeviceThreadBlock(memory));
  } else {
    kernel(DeviceThreadBlock(nullptr));
  }
}

template <class Kernel>
void launch_blocks(const char* op, const Kernel& kernel) {
  const std::int64_t blocks = kernel.blocks();
  if (blocks == 0) return;
  STD_TORCH_CHECK(blocks <= INT32_MAX, op, ": tensors: expected at most ", INT32_MAX,
                  " blocks of threads in a launch, got ", blocks, ". Split the tensors.");
  const Launcher launcher(op);
  run_blocks<Kernel>
      <<<static_cast<unsigned>(blocks), Kernel::kThreads, 0, launcher.stream>>>(kernel);
  check(op, cudaGetLastError());
}

}  // namespace zero_ext::cuda
