#include "optimizer_arg_checks.h"

namespace zero_ext::ops {

void check_bounds(const char* op, std::int64_t i, std::int64_t begin, std::int64_t end,
                  std::int64_t previous, std::int64_t numel) {
  STD_TORCH_CHECK(begin >= previous && begin <= end && end <= numel, op, ": segments[", i,
                  "]: expected a range inside [", previous, ", ", numel, "), got [", begin, ", ",
                  end, "). Sort the segments and keep them disjoint.");
}

void check_hyperparameters(const char* op, std::int64_t i, const core::HyperparameterError& error) {
  STD_TORCH_CHECK(error.field == core::DeviceField::none, op, ": ",
                  core::text_of(error.field, core::kDeviceFields), " of hyper[", i, "]: expected ",
                  core::text_of(error.expected, core::kExpectedValues), ", got ", error.value,
                  ". Change the optimizer's setting.");
}

float read_scale(const char* op, const Tensor& grad_scale) {
  check_scale(op, grad_scale);
  return *grad_scale.const_data_ptr<float>();
}

}  // namespace zero_ext::ops
