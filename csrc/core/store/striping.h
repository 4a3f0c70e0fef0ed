// How one address space is spread over several devices (RAID-0).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace zero_ext::core {

// An extent of a transfer that is contiguous on one device.
struct StripeExtent {
  std::size_t device;
  std::int64_t device_offset;
  std::int64_t transfer_offset;  // from the start of the transfer
  std::int64_t bytes;
};

// Stripe s of the address space is stripe s / devices of device s % devices.
class Striping {
 public:
  // Throws std::runtime_error for no devices or a stripe below one byte.
  Striping(std::size_t devices, std::int64_t stripe_bytes);

  // The extents of [offset, offset + bytes) in ascending order; on one device there is one extent.
  std::vector<StripeExtent> extents(std::int64_t offset, std::int64_t bytes) const;

  // Bytes of [0, total) that lie on `device`.
  std::int64_t device_bytes(std::size_t device, std::int64_t total) const;

 private:
  std::int64_t devices_;
  std::int64_t stripe_bytes_;
};

}  // namespace zero_ext::core
