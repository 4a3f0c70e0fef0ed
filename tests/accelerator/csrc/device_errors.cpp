// Values that only the device sees are checked here by the CUDA kernels' own code, which records
// what it cannot use. The rest of an op is the CPU's.
#include <torch/library.h>

#include <array>
#include <vector>

#include "../../../csrc/core/optimizers/optimizer_rules.h"
#include "../../../csrc/cuda/optimizers/segment_search.h"
#include "allocator.h"
#include "fallback.h"
#include "memory_space.h"
#include "streams.h"

namespace stand_in {
namespace {

namespace core = zero_ext::core;
namespace cuda = zero_ext::cuda;

core::DeviceErrorRecord* record_of(const at::Tensor& tensor) {
  static std::array<core::DeviceErrorRecord, kDeviceCount> records{};
  return &records.at(static_cast<std::size_t>(tensor.device().index()));
}

template <class T>
T* memory_of(const at::Tensor& tensor) {
  return reinterpret_cast<T*>(open_alias(tensor.const_data_ptr()));
}

const at::Tensor& argument(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                           const char* name) {
  const auto& schema = op.schema();
  const auto place = static_cast<std::size_t>(schema.argumentIndexWithName(name).value());
  return stack[stack.size() - schema.arguments().size() + place].toTensor();
}

void pop_device_error(const at::Tensor& record) {
  const OnDevice guard(record.device());
  current_stream(record.device().index()).drain();
  cuda::PopDeviceError{record_of(record), memory_of<std::int64_t>(record)}(0, 1);
}

// A step whose settings are refused changes nothing.
template <class Rule>
void run_step(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::Tensor& master = argument(op, *stack, "master");
  const at::Tensor& segments = argument(op, *stack, "segments");
  const at::Tensor& hyper = argument(op, *stack, "hyper");
  const at::Tensor& scale = argument(op, *stack, "grad_scale");
  const OnDevice guard(master.device());
  current_stream(master.device().index()).drain();
  const auto* const bounds = memory_of<const std::int64_t>(segments);
  const std::int64_t count = segments.size(0);
  std::vector<core::OptimizerSegment<Rule>> prepared(static_cast<std::size_t>(count));
  const std::string name = op.schema().name().substr(op.schema().name().find("::") + 2);
  cuda::PrepareSegments<Rule>{core::device_op(name),
                              record_of(master),
                              bounds,
                              memory_of<const double>(hyper),
                              memory_of<const float>(scale),
                              count,
                              master.numel(),
                              prepared.data()}(0, 1);
  if (count > 0 && prepared.back().end != bounds[2 * count - 1]) {
    torch::jit::drop(*stack, op.schema().arguments().size());
    return;
  }
  run_on_host(op, stack);
}

template <class Rule>
torch::CppFunction step() {
  return torch::CppFunction::makeFromBoxedFunction<&run_step<Rule>>();
}

}  // namespace

TORCH_LIBRARY_IMPL(zero_ext, PrivateUse1, library) {
  library.impl("pop_device_error_", &pop_device_error);
  core::OptimizerRules::visit([&]<class Rule>() { library.impl(Rule::kOp, step<Rule>()); });
  library.impl("adam_step_8bit_", step<core::AdamRule>());
  library.impl("lamb_norms_", step<core::LambRule>());
}

}  // namespace stand_in
