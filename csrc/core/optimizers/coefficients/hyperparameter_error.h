// What is wrong with a row of hyper-parameters.
#pragma once

#include "../../base/device_error.h"
#include "../../base/host_device.h"

namespace zero_ext::core {

struct HyperparameterError {
  DeviceField field = DeviceField::none;
  double value = 0;
  ExpectedValue expected = ExpectedValue::finite;
};

ZERO_EXT_HOST_DEVICE bool is_finite(double value) { return value - value == 0; }

}  // namespace zero_ext::core
