// Zeros over a range of a file.
#pragma once

#include <cstdint>
#include <memory>

#include "../aio/io_engine.h"

namespace zero_ext::core {

// Returns when all of [offset, offset + bytes) was written; throws what the engine throws, with no
// transfer under way any more.
void write_zeros(IoEngine& engine, const std::shared_ptr<IoFile>& file, std::int64_t offset,
                 std::int64_t bytes);

}  // namespace zero_ext::core
