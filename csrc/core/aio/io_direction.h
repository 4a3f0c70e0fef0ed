// The direction of a transfer, seen from memory.
#pragma once

namespace zero_ext::core {

enum class IoDirection { kRead, kWrite };

}  // namespace zero_ext::core
