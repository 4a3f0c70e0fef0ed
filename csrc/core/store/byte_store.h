// What the step pipeline and the tiers need of storage: bytes at offsets, read and written
// asynchronously.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "../aio/transfer_handle.h"

namespace zero_ext::core {

class ByteStore {
 public:
  virtual ~ByteStore() = default;

  // What offsets, lengths and memory addresses must be multiples of.
  virtual std::int64_t alignment() const = 0;

  // Both return at once; transfers of overlapping ranges must be waited for in between.
  virtual std::shared_ptr<TransferHandle> read(std::int64_t offset, std::span<std::byte> into) = 0;
  virtual std::shared_ptr<TransferHandle> write(std::int64_t offset,
                                                std::span<const std::byte> from) = 0;
};

}  // namespace zero_ext::core
