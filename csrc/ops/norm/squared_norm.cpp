// zero_ext::squared_norm_ and squared_norm_value: the exact global norm.
#include "../../core/norm/squared_norm.h"

#include <mutex>
#include <span>

#include "../op_registration.h"
#include "norm_arg_checks.h"

namespace zero_ext::ops {
namespace {

using core::Superaccumulator;

using Entries = std::span<std::int64_t, Superaccumulator::kEntries>;

constexpr std::int64_t kGrain = 65536;

void squared_norm(const Tensor& grad, const Tensor& accumulator) {
  const auto arguments = read_norm_arguments(grad, accumulator);
  Superaccumulator total;
  std::mutex mutex;
  torch::stable::parallel_for(0, grad.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    Superaccumulator partial;
    core::add_squares(arguments.values, arguments.type, begin, end, partial);
    const std::lock_guard lock(mutex);
    total.merge(partial);
  });
  total.add_to(Entries(arguments.target, Superaccumulator::kEntries));
}

Tensor squared_norm_value(const Tensor& accumulator) {
  constexpr const char* op = "squared_norm_value";
  double value = 0;
  const Entries entries(check_accumulator(op, accumulator), Superaccumulator::kEntries);
  STD_TORCH_CHECK(Superaccumulator::value(entries, value), op,
                  ": argument 'accumulator': expected sums of squared_norm_, got a negative one. "
                  "Start from a tensor of zeros.");
  const Tensor result = torch::stable::empty({}, ScalarType::Double);
  *result.mutable_data_ptr<double>() = value;
  return result;
}

}  // namespace

ZERO_EXT_OPS(CPU) {
  ops("squared_norm_(Tensor grad, Tensor(a!) accumulator) -> ()", TORCH_BOX(&squared_norm));
  ops("squared_norm_value(Tensor accumulator) -> Tensor", TORCH_BOX(&squared_norm_value));
}

}  // namespace zero_ext::ops
