// Device and pinned host memory as torch asks for them.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "memory_space.h"
#include "streams.h"

namespace stand_in {

// The calling thread's current device and, on a device, current stream.
int current_device();
int exchange_device(int device);
Stream& current_stream(int device);
std::int64_t exchange_stream(int device, std::int64_t id);

// Allocations go to a tensor's own device.
class OnDevice {
 public:
  explicit OnDevice(std::optional<c10::Device> device)
      : previous_(
            exchange_device(device && device->has_index() ? device->index() : current_device())) {}
  ~OnDevice() { exchange_device(previous_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const int previous_;
};

// Stream-aware as a caching allocator is: freed memory is poisoned and given back when the stream
// it was allocated on gets there, and after what streams named by record_stream had to do when it
// was freed.
class DeviceMemory final : public c10::DeviceAllocator {
 public:
  static DeviceMemory& get();
  DeviceMemory();

  c10::DataPtr allocate(std::size_t bytes) override;
  void copy_data(void* destination, const void* source, std::size_t bytes) const override;
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t pool = {0, 0}) override;
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override;

  // Bytes, rounded as in the statistics, beyond which allocations fail.
  void set_limit(int device, std::size_t bytes);
  void free(std::byte* address);
  void record_use(const c10::DataPtr& pointer, Stream& user);

 private:
  struct Block {
    std::size_t requested;
    std::size_t rounded;
    std::vector<Stream*> users;  // the one it was allocated on, then those recorded
  };
  struct Device {
    explicit Device(int index) : addresses(index) {}
    AddressPool addresses;
    std::unordered_map<std::byte*, Block> blocks;
    c10::CachingDeviceAllocator::DeviceStats stats;
    std::size_t limit = kDeviceBytes;
  };

  std::byte* take(Device& device, std::size_t bytes);
  void check_limit(Device& device, int index, std::size_t requested, std::size_t rounded);

  std::mutex mutex_;
  std::vector<std::unique_ptr<Device>> devices_;
};

void register_device_memory();

}  // namespace stand_in
