// Rows of hyper-parameters: what each number of one must be, and what is wrong with it.
#pragma once

#include "../base/device_error.h"
#include "../base/host_device.h"

namespace zero_ext::core {

ZERO_EXT_HOST_DEVICE bool is_finite(double value) { return value - value == 0; }

// One number of a row.
struct HyperField {
  DeviceField field = DeviceField::none;
  ExpectedValue expected = ExpectedValue::any;
};

struct HyperparameterError {
  DeviceField field = DeviceField::none;
  double value = 0;
  ExpectedValue expected = ExpectedValue::any;
};

ZERO_EXT_HOST_DEVICE bool is_as_expected(double value, ExpectedValue expected) {
  switch (expected) {
    case ExpectedValue::finite:
      return is_finite(value);
    case ExpectedValue::finite_not_negative:
      return is_finite(value) && value >= 0;
    case ExpectedValue::finite_at_least_one:
      return is_finite(value) && value >= 1;
    case ExpectedValue::below_one:
      return value >= 0 && value < 1;
    case ExpectedValue::up_to_one:
      return value > 0 && value <= 1;
    case ExpectedValue::zero_or_one:
      return value == 0 || value == 1;
    default:
      return true;
  }
}

// The first error in a row of Rule::kHyper numbers.
template <class Rule>
ZERO_EXT_HOST_DEVICE HyperparameterError hyperparameter_error(const double* row) {
  for (int i = 0; i < Rule::kHyper; ++i) {
    const HyperField each = Rule::hyper_field(i);
    if (!is_as_expected(row[i], each.expected)) return {each.field, row[i], each.expected};
  }
  return {};
}

// A row as an array, for structured bindings.
template <class Rule>
ZERO_EXT_HOST_DEVICE const double (&row_of(const double* row))
    [Rule::kHyper] { return *reinterpret_cast<const double (*)[Rule::kHyper]>(row); }

}  // namespace zero_ext::core
