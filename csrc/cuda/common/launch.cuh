// Runs a kernel object over a grid of one dimension, on the current stream of the current device.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "../../core/base/rounding.h"
#include "../../ops/checks.h"
#include "error_recording.h"
#include "launch_error.h"
#include "warp_shuffle.h"

namespace zero_ext::cuda {

inline constexpr int kThreads = 256;
inline constexpr int kMaxDevices = 64;  // whose occupancies are cached
inline constexpr int kWarpsOfBlock = kThreads / kWarpLanes;
// Shared memory that every GPU gives a block without being asked.
inline constexpr std::size_t kSharedBytes = 48 << 10;
// Blocks of a processor: the registers of a thread are limited so that as many fit. Kernels that
// keep few bytes on their way say kMinBlocks, where more of them were measured to be faster.
inline constexpr int kMinBlocksOfProcessor = 2;

template <class Kernel>
consteval int min_blocks() {
  if constexpr (requires { Kernel::kMinBlocks; }) return Kernel::kMinBlocks;
  return kMinBlocksOfProcessor;
}

template <class Kernel>
__global__ void __launch_bounds__(kThreads, min_blocks<Kernel>())
    run_kernel(const __grid_constant__ Kernel kernel) {
  kernel(std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x, std::int64_t{gridDim.x} * blockDim.x);
}

inline GpuProperties gpu_properties() {
  GpuProperties gpu{};
  cudaGetDevice(&gpu.device);
  cudaDeviceGetAttribute(&gpu.major, cudaDevAttrComputeCapabilityMajor, gpu.device);
  cudaDeviceGetAttribute(&gpu.minor, cudaDevAttrComputeCapabilityMinor, gpu.device);
  cudaDeviceGetAttribute(&gpu.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlock, gpu.device);
  cudaDeviceGetAttribute(&gpu.registers, cudaDevAttrMaxRegistersPerBlock, gpu.device);
  return gpu;
}

inline std::optional<LaunchError> launch_error_of(cudaError_t status) {
  switch (status) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
      return LaunchError::no_code;
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorInsufficientDriver:
      return LaunchError::old_driver;
    case cudaErrorLaunchOutOfResources:
      return LaunchError::resources;
    default:
      return std::nullopt;
  }
}

inline void check(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return;
  const std::optional<LaunchError> error = launch_error_of(status);
  STD_TORCH_CHECK(false, op, ": ", cudaGetErrorString(status), ". ",
                  error
                      ? explain(*error, gpu_properties())
                      : "Run it again with CUDA_LAUNCH_BLOCKING=1 to find the launch that fails.");
}

// The record of the current device's errors. It is in the device's memory as long as the process
// lives, so a captured graph may refer to it.
DeviceErrorRecord* device_errors(const char* op);

// Where and how wide launches of one op are.
struct Launcher {
  const char* op;
  std::int64_t processors;
  cudaStream_t stream;

  int device = 0;

  explicit Launcher(const char* name) : op(name) {
    int count = 0;
    check(op, cudaGetDevice(&device));
    check(op, cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    void* current = nullptr;
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device, &current) == AOTI_TORCH_SUCCESS, op,
                    ": torch has no current stream of device ", device,
                    ". Call torch.cuda.init() before.");
    processors = count;
    stream = static_cast<cudaStream_t>(current);
  }

  // As many blocks of kThreads as run at once, or fewer if fewer are needed: grids stride.
  template <auto kFunction>
  unsigned blocks(std::int64_t needed) const {
    return static_cast<unsigned>(std::min(needed, processors * resident_blocks<kFunction>()));
  }

 private:
  // Of a processor. All devices of a process that the module has code for are asked once each.
  template <auto kFunction>
  std::int64_t resident_blocks() const {
    static std::array<std::atomic<int>, kMaxDevices> known{};
    const bool is_cached = device < kMaxDevices;
    int count = is_cached ? known[device].load(std::memory_order_relaxed) : 0;
    if (count == 0) {
      check(op, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kFunction, kThreads, 0));
      if (is_cached) known[device].store(count, std::memory_order_relaxed);
    }
    return count;
  }
};

template <class Kernel>
__global__ void __launch_bounds__(kThreads, min_blocks<Kernel>())
    run_warps(const __grid_constant__ Kernel kernel) {
  kernel(std::int64_t{blockIdx.x} * kWarpsOfBlock + threadIdx.x / kWarpLanes,
         std::int64_t{gridDim.x} * kWarpsOfBlock);
}

// `work` is what finds something to do, of which a block has `of_block`; with none nothing is
// launched.
template <auto kFunction, class Kernel>
void launch_grid(const char* op, const Kernel& kernel, std::int64_t work, std::int64_t of_block) {
  if (work == 0) return;
  const Launcher launcher(op);
  const unsigned blocks = launcher.blocks<kFunction>(core::ceil_div(work, of_block));
  kFunction<<<blocks, kThreads, 0, launcher.stream>>>(kernel);
  check(op, cudaGetLastError());
}

// `work` is the number of threads.
template <class Kernel>
void launch(const char* op, const Kernel& kernel, std::int64_t work) {
  launch_grid<run_kernel<Kernel>>(op, kernel, work, kThreads);
}

// For a kernel that whole warps run; `work` is the number of warps.
template <class Kernel>
void launch_warps(const char* op, const Kernel& kernel, std::int64_t work) {
  launch_grid<run_warps<Kernel>>(op, kernel, work, kWarpsOfBlock);
}

}  // namespace zero_ext::cuda
