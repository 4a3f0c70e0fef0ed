// The places of a nested grid that a thread comes to, without a division for each: those take a
// device some hundred instructions.
#pragma once

#include <cstdint>

#include "../../core/portability.h"

namespace zero_ext::cuda {

// Part, block of the part and place in the block of the numbers `thread`, `threads` further on and
// so on, when places are counted through; there is at least one block of at least one place.
struct GridPlace {
  std::int64_t part;
  std::int64_t block;
  std::int64_t place;

  static ZERO_EXT_HOST_DEVICE GridPlace of(std::int64_t number, std::int64_t blocks,
                                           std::int64_t places) {
    const std::int64_t through = number / places;
    const std::int64_t part = through / blocks;
    return {part, through - part * blocks, number - through * places};
  }

  ZERO_EXT_HOST_DEVICE void advance(const GridPlace& by, std::int64_t blocks, std::int64_t places) {
    place += by.place;
    block += by.block;
    part += by.part;
    if (place >= places) {
      place -= places;
      ++block;
    }
    if (block >= blocks) {
      block -= blocks;
      ++part;
    }
  }
};

}  // namespace zero_ext::cuda
