// zero_ext::squared_norm_ and squared_norm_value: the exact global norm.
#include "../core/squared_norm.h"

#include <mutex>
#include <span>

#include "../core/superaccumulator.h"
#include "checks.h"

namespace zero_ext::ops {
namespace {

using core::Superaccumulator;

constexpr std::int64_t kGrain = 65536;

std::span<std::int64_t, Superaccumulator::kEntries> check_accumulator(const char* op,
                                                                      const Tensor& accumulator) {
  const Argument argument{op, "accumulator"};
  check_dtype(accumulator, argument, ScalarType::Long);
  check_flat(accumulator, argument, Superaccumulator::kEntries);
  return std::span<std::int64_t, Superaccumulator::kEntries>(
      accumulator.mutable_data_ptr<std::int64_t>(), Superaccumulator::kEntries);
}

void squared_norm(const Tensor& grad, const Tensor& accumulator) {
  constexpr const char* op = "squared_norm_";
  const core::NumericType type = check_numeric(grad, {op, "grad"});
  check_flat(grad, {op, "grad"}, grad.numel());
  const auto entries = check_accumulator(op, accumulator);
  check_disjoint({extent(grad, {op, "grad"}), extent(accumulator, {op, "accumulator"})});
  const void* values = grad.const_data_ptr();
  Superaccumulator total;
  std::mutex mutex;
  torch::stable::parallel_for(0, grad.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    Superaccumulator part;
    core::add_squares(values, type, begin, end, part);
    const std::lock_guard lock(mutex);
    total.merge(part);
  });
  total.add_to(entries);
}

Tensor squared_norm_value(const Tensor& accumulator) {
  constexpr const char* op = "squared_norm_value";
  double value = 0;
  STD_TORCH_CHECK(Superaccumulator::value(check_accumulator(op, accumulator), value), op,
                  ": argument 'accumulator' holds a negative sum; it must come from squared_norm_ "
                  "on a tensor that started as zeros");
  const Tensor result = torch::stable::empty({}, ScalarType::Double);
  *result.mutable_data_ptr<double>() = value;
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_ext, library) {
  library.def("squared_norm_(Tensor grad, Tensor(a!) accumulator) -> ()");
  library.def("squared_norm_value(Tensor accumulator) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CPU, library) {
  library.impl("squared_norm_", TORCH_BOX(&squared_norm));
  library.impl("squared_norm_value", TORCH_BOX(&squared_norm_value));
}

}  // namespace zero_ext::ops
