// The places of a nested grid that a warp comes to, without a division for each: those take a
// device some hundred instructions.
#pragma once

#include <cstdint>

#include "../../core/base/host_device.h"

namespace zero_ext::cuda {

// Calls visit(part, place) for the numbers `first`, `step` further on and so on of all parts'
// places, `places` each, counted through.
template <class Visit>
ZERO_EXT_HOST_DEVICE void over_places(std::int64_t first, std::int64_t step, std::int64_t parts,
                                      std::int64_t places, const Visit& visit) {
  if (places == 0) return;
  const std::int64_t parts_further = step / places;
  const std::int64_t places_further = step - parts_further * places;
  std::int64_t part = first / places;
  std::int64_t place = first - part * places;
  while (part < parts) {
    visit(part, place);
    part += parts_further;
    place += places_further;
    if (place >= places) {
      place -= places;
      ++part;
    }
  }
}

}  // namespace zero_ext::cuda
