// Why a GPU does not run a kernel, in words.
#pragma once

#include <cstdint>
#include <string>

namespace zero_ext::cuda {

// Properties of a GPU that error messages name.
struct GpuProperties {
  int device;
  int major;  // compute capability
  int minor;
  int shared_bytes;  // most that a block may have without asking for more
  int registers;     // most that a block may have
};

enum class LaunchError : std::uint8_t {
  no_code,     // the module holds none for the GPU
  old_driver,  // it holds PTX that the driver cannot translate
  resources,   // a block needs more than a processor of the GPU has
};

inline constexpr int kMinMajor = 8;

inline std::string explain(LaunchError error, const GpuProperties& gpu) {
  const std::string name = "cuda:" + std::to_string(gpu.device) + ", of compute capability " +
                           std::to_string(gpu.major) + "." + std::to_string(gpu.minor) + ", ";
  switch (error) {
    case LaunchError::no_code:
      if (gpu.major < kMinMajor) {
        return name +
               "cannot run the kernels, which need 8.0 or higher. Keep the tensors on the CPU.";
      }
      return name + "finds no code for it in module _C_cuda. Build the module again for it, by " +
             "`zero-ext build`.";
    case LaunchError::old_driver:
      return name +
             "has a driver that cannot translate this module's PTX. Update the driver to the CUDA "
             "version " +
             "that built the module, or build it with the driver's.";
    case LaunchError::resources:
      break;
  }
  return name + "gives a block " + std::to_string(gpu.shared_bytes) +
         " bytes of shared memory and " + std::to_string(gpu.registers) +
         " registers, and the kernel needs more. See docs/contributing/cuda_kernels.md for each.";
}

}  // namespace zero_ext::cuda
