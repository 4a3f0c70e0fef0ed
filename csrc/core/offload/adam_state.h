// The fields of Adam's state in a store, for every type of moments.
#pragma once

#include <cstdint>
#include <vector>

#include "chunk_layout.h"

namespace zero_ext::core {

// blockwise8: dynamic codes of one byte, and a float32 scale for each block of them.
enum class AdamMoments : std::uint8_t { float32, bfloat16, blockwise8 };

// float32, bfloat16: master, exp_avg, exp_avg_sq. blockwise8: master, scales of exp_avg and of
// exp_avg_sq, codes of exp_avg and of exp_avg_sq; so every field begins at a multiple of its size.
std::vector<StateField> adam_fields(AdamMoments moments);

}  // namespace zero_ext::core
