// From the element types of buffers to the types of kernels.
#pragma once

#include <type_traits>

#include "../../core/base/numeric_types.h"

namespace zero_ext::cuda {

// Calls visit(std::type_identity<T>) with the element type T that `type` names.
template <class Visit>
void with_type(core::NumericType type, const Visit& visit) {
  switch (type) {
    case core::NumericType::float32:
      return visit(std::type_identity<float>{});
    case core::NumericType::bfloat16:
      return visit(std::type_identity<core::BFloat16>{});
    case core::NumericType::float16:
      return visit(std::type_identity<core::Float16>{});
  }
}

}  // namespace zero_ext::cuda
