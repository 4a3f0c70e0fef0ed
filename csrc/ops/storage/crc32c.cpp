// zero_ext::crc32c: the checksum of checkpoint files.
#include "../../core/base/crc32c.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "../checks.h"
#include "../op_registration.h"

namespace zero_ext::ops {
namespace {

std::int64_t crc32c(const Tensor& bytes, std::int64_t seed) {
  const Argument argument{"crc32c", "bytes"};
  check_dtype(bytes, argument, ScalarType::Byte);
  check_flat(bytes, argument, bytes.numel());
  STD_TORCH_CHECK(seed >= 0 && seed <= std::numeric_limits<std::uint32_t>::max(),
                  "crc32c: argument 'seed': expected a checksum, 0 or more and below 2^32, got ",
                  seed, ". Pass 0 or the checksum of what comes before.");
  const std::span<const std::byte> view(static_cast<const std::byte*>(bytes.const_data_ptr()),
                                        static_cast<std::size_t>(bytes.numel()));
  return core::crc32c(view, static_cast<std::uint32_t>(seed));
}

}  // namespace

ZERO_EXT_OPS(CPU) {
  // SymInt, so that tracing can carry a value that it cannot know.
  ops("crc32c(Tensor bytes, int seed) -> SymInt", TORCH_BOX(&crc32c));
}

}  // namespace zero_ext::ops
