// Strides over a nested grid without a division per step: a 64-bit division takes a device some
// hundred instructions.
#pragma once

#include <cstdint>

#include "../../core/base/host_device.h"

namespace zero_ext::cuda {

// Visits the items of a grid of `outer` groups of `inner` items each, numbered through: calls
// visit(group, item) for number `first` and every `step`-th number after it.
template <class Visit>
ZERO_EXT_HOST_DEVICE void for_each_nested(std::int64_t first, std::int64_t step, std::int64_t outer,
                                          std::int64_t inner, const Visit& visit) {
  if (inner == 0) return;
  const std::int64_t group_step = step / inner;
  const std::int64_t item_step = step - group_step * inner;
  std::int64_t group = first / inner;
  std::int64_t item = first - group * inner;
  while (group < outer) {
    visit(group, item);
    group += group_step;
    item += item_step;
    if (item >= inner) {
      item -= inner;
      ++group;
    }
  }
}

}  // namespace zero_ext::cuda
