// Two to the power of a fraction.
#pragma once

#include "../base/host_device.h"

namespace zero_ext::core {

// 2^f for f in [-1/2, 1/2], to 2e-9 before rounding: the polynomial of degree 6 with constant term
// 1 whose largest relative error is least.
template <class V>
ZERO_EXT_HOST_DEVICE typename V::Float exp2_of_fraction(typename V::Float f) {
  typename V::Float sum = V::set(0.000153533618F);
  sum = V::fma(sum, f, V::set(0.00133988744F));
  sum = V::fma(sum, f, V::set(0.00961843736F));
  sum = V::fma(sum, f, V::set(0.0555033247F));
  sum = V::fma(sum, f, V::set(0.240226479F));
  sum = V::fma(sum, f, V::set(0.693147203F));
  return V::fma(sum, f, V::set(1.0F));
}

}  // namespace zero_ext::core
