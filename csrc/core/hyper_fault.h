// What is wrong with a row of hyper-parameters.
#pragma once

#include "portability.h"

namespace zero_ext::core {

// `name` is null when nothing is.
struct HyperFault {
  const char* name;
  double value;
  const char* wanted;
};

ZERO_EXT_HOST_DEVICE bool is_finite(double value) { return value - value == 0; }

}  // namespace zero_ext::core
