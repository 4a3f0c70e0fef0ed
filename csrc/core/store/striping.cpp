#include "striping.h"

#include <algorithm>

#include "../base/error_text.h"

namespace zero_ext::core {

Striping::Striping(std::size_t devices, std::int64_t stripe_bytes)
    : devices_(static_cast<std::int64_t>(devices)), stripe_bytes_(stripe_bytes) {
  require(devices != 0, "store: expected at least one path, got none. Pass one for each device.");
  require(stripe_bytes >= 1, "store: stripe_bytes: expected at least 1, got ", stripe_bytes,
          ". Raise it.");
}

std::vector<StripeExtent> Striping::extents(std::int64_t offset, std::int64_t bytes) const {
  std::vector<StripeExtent> found;
  for (std::int64_t done = 0; done < bytes;) {
    const std::int64_t stripe = (offset + done) / stripe_bytes_;
    const std::int64_t within = (offset + done) % stripe_bytes_;
    // On one device the next stripe follows in the file as it does in memory.
    const std::int64_t length =
        devices_ == 1 ? bytes - done : std::min(bytes - done, stripe_bytes_ - within);
    found.push_back({static_cast<std::size_t>(stripe % devices_),
                     stripe / devices_ * stripe_bytes_ + within, done, length});
    done += length;
  }
  return found;
}

std::int64_t Striping::device_bytes(std::size_t device, std::int64_t total) const {
  const std::int64_t row = devices_ * stripe_bytes_;
  const std::int64_t begin_in_row = static_cast<std::int64_t>(device) * stripe_bytes_;
  return total / row * stripe_bytes_ +
         std::clamp<std::int64_t>(total % row - begin_in_row, 0, stripe_bytes_);
}

}  // namespace zero_ext::core
