// Which way a transfer goes, seen from memory.
#pragma once

namespace zero_ext::core {

enum class IoDirection { kRead, kWrite };

}  // namespace zero_ext::core
