// Device memory: addresses that fault when the host touches them, and the open alias kernels use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace stand_in {

constexpr int kDeviceCount = 2;
constexpr std::size_t kDeviceBytes = std::size_t{1} << 36;  // of addresses; pages come at first use
constexpr std::size_t kGranule = 512;                       // a caching allocator's rounding
constexpr unsigned char kPoison = 0xFF;                     // NaN in every float format

struct Range {
  const std::byte* begin = nullptr;
  std::size_t bytes = 0;

  bool overlaps(const Range& other) const {
    return begin < other.begin + other.bytes && other.begin < begin + bytes;
  }
};

// Index of the device that owns an address, or -1 for host memory.
int device_of(const void* address);

// The address under which kernels reach it: of the open alias for device memory, itself for host
// memory.
std::byte* open_alias(const void* address);

// Free addresses of one device, first fit.
class AddressPool {
 public:
  explicit AddressPool(int device);
  // nullptr if no free range is large enough.
  std::byte* take(std::size_t bytes);
  void give(std::byte* address, std::size_t bytes);
  // Returns the pages of free addresses to the system.
  void drop_pages();

 private:
  std::mutex mutex_;
  std::map<std::byte*, std::size_t> free_;
};

}  // namespace stand_in

// open_alias, for libraries that find it by name.
extern "C" void* stand_in_open_alias(const void* address);
