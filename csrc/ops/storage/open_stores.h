// The open stores of this process, for ops that work on one.
#pragma once

#include <cstdint>
#include <memory>

#include "../../core/store/byte_store.h"

namespace zero_ext::ops {

// The store that store_open made under `handle`; whoever holds it keeps it open. An error as of
// STD_TORCH_CHECK if there is none.
std::shared_ptr<core::ByteStore> store_of(std::int64_t handle);

}  // namespace zero_ext::ops
