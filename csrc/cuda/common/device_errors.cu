// zero_ext::pop_device_error_ on CUDA devices, and the records that it empties.
#include "../../ops/device_error_arg_checks.h"
#include "launch.cuh"

namespace zero_ext::cuda {
namespace {

using ops::Tensor;

// Every device that the module is loaded on has one, which begins as zeros.
__device__ DeviceErrorRecord record_of_device;

}  // namespace

DeviceErrorRecord* device_errors(const char* op) {
  static std::array<std::atomic<void*>, kMaxDevices> known{};
  int device = 0;
  check(op, cudaGetDevice(&device));
  const bool is_cached = device < kMaxDevices;
  void* found = is_cached ? known[device].load(std::memory_order_relaxed) : nullptr;
  if (found == nullptr) {
    check(op, cudaGetSymbolAddress(&found, record_of_device));
    if (is_cached) known[device].store(found, std::memory_order_relaxed);
  }
  return static_cast<DeviceErrorRecord*>(found);
}

namespace {

void pop_device_error(const Tensor& record) {
  constexpr const char* op = "pop_device_error_";
  const torch::stable::accelerator::DeviceGuard guard(record.get_device_index());
  launch(op, PopDeviceError{device_errors(op), ops::check_device_error(op, record)}, 1);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CUDA, library) {
  library.impl("pop_device_error_", TORCH_BOX(&pop_device_error));
}

}  // namespace zero_ext::cuda
