#include "allocator.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

namespace stand_in {
namespace {

using c10::CachingAllocator::StatArray;

// Allocations from here on are also counted by themselves, as torch's large pool is.
constexpr std::size_t kLarge = std::size_t{64} << 10;
constexpr auto kLargePool = static_cast<std::size_t>(c10::CachingAllocator::StatType::LARGE_POOL);

thread_local int device_of_thread = 0;
thread_local std::array<std::int64_t, kDeviceCount> stream_of_thread{};

void increase(StatArray& stat, std::size_t amount) { stat[0].increase(amount); }
void decrease(StatArray& stat, std::size_t amount) { stat[0].decrease(amount); }

void free_device_memory(void* address) {
  DeviceMemory::get().free(static_cast<std::byte*>(address));
}

// Poisons memory and gives it back once all streams that were to finish with it have.
void retire(AddressPool& addresses, Range range, const std::vector<Stream*>& streams) {
  const auto waiting = std::make_shared<std::atomic<std::size_t>>(streams.size());
  const auto arrive = [&addresses, range, waiting] {
    if (--*waiting == 0) {
      auto* const address = const_cast<std::byte*>(range.begin);
      std::memset(open_alias(address), kPoison, range.bytes);
      addresses.give(address, range.bytes);
    }
  };
  for (Stream* const stream : streams) {
    if (stream->reached(stream->ticket())) {
      arrive();
    } else {
      stream->enqueue({arrive, {}});
    }
  }
}

}  // namespace

int current_device() { return device_of_thread; }

int exchange_device(int device) { return std::exchange(device_of_thread, device); }

Stream& current_stream(int device) {
  return stream_of(device, stream_of_thread.at(static_cast<std::size_t>(device)));
}

std::int64_t exchange_stream(int device, std::int64_t id) {
  return std::exchange(stream_of_thread.at(static_cast<std::size_t>(device)), id);
}

DeviceMemory& DeviceMemory::get() {
  // Never destroyed: it outlives every tensor.
  static DeviceMemory* const leaked = std::make_unique<DeviceMemory>().release();
  return *leaked;
}

DeviceMemory::DeviceMemory() {
  for (int device = 0; device < kDeviceCount; ++device) {
    devices_.push_back(std::make_unique<Device>(device));
  }
}

void DeviceMemory::check_limit(Device& device, int index, std::size_t requested,
                               std::size_t rounded) {
  const auto used = static_cast<std::size_t>(device.stats.allocated_bytes[0].current);
  if (used + rounded > device.limit) {
    ++device.stats.num_ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "stand_in out of memory. Tried to allocate ",
                     requested, " bytes. Device ", index, " has a capacity of ", device.limit,
                     " bytes, of which ", device.limit - std::min(used, device.limit),
                     " are free.");
  }
}

std::byte* DeviceMemory::take(Device& device, std::size_t bytes) {
  std::byte* const address = device.addresses.take(bytes);
  TORCH_CHECK_WITH(OutOfMemoryError, address != nullptr,
                   "stand_in out of memory: no free addresses for ", bytes, " bytes");
  return address;
}

c10::DataPtr DeviceMemory::allocate(std::size_t bytes) {
  const int index = current_device();
  const c10::Device torch_device(c10::DeviceType::PrivateUse1,
                                 static_cast<c10::DeviceIndex>(index));
  if (bytes == 0) {
    return {nullptr, torch_device};
  }
  const std::size_t rounded = (bytes + kGranule - 1) / kGranule * kGranule;
  const std::lock_guard lock(mutex_);
  Device& device = *devices_[static_cast<std::size_t>(index)];
  check_limit(device, index, bytes, rounded);
  std::byte* const address = take(device, rounded);
  std::memset(open_alias(address), kPoison, rounded);
  device.blocks.emplace(address, Block{bytes, rounded, {&current_stream(index)}});
  increase(device.stats.allocation, 1);
  if (bytes >= kLarge) {
    device.stats.allocation[kLargePool].increase(1);
  }
  increase(device.stats.requested_bytes, bytes);
  increase(device.stats.allocated_bytes, rounded);
  increase(device.stats.active_bytes, rounded);
  auto& reserved = device.stats.reserved_bytes;
  const auto wanted = device.stats.allocated_bytes[0].current;
  if (wanted > reserved[0].current) {
    increase(reserved, static_cast<std::size_t>(wanted - reserved[0].current));
  }
  return {address, address, &free_device_memory, torch_device};
}

void DeviceMemory::free(std::byte* address) {
  const std::unique_lock lock(mutex_);
  Device& device = *devices_.at(static_cast<std::size_t>(device_of(address)));
  const auto found = device.blocks.find(address);
  TORCH_INTERNAL_ASSERT(found != device.blocks.end());
  const Block block = std::move(found->second);
  device.blocks.erase(found);
  decrease(device.stats.allocation, 1);
  if (block.requested >= kLarge) {
    device.stats.allocation[kLargePool].decrease(1);
  }
  decrease(device.stats.requested_bytes, block.requested);
  decrease(device.stats.allocated_bytes, block.rounded);
  decrease(device.stats.active_bytes, block.rounded);
  retire(device.addresses, {address, block.rounded}, block.users);
}

void DeviceMemory::recordStream(const c10::DataPtr& pointer, c10::Stream stream) {
  record_use(pointer, stream_of(stream.device_index(), stream.id()));
}

void DeviceMemory::record_use(const c10::DataPtr& pointer, Stream& user) {
  auto* const address = static_cast<std::byte*>(pointer.get());
  if (address == nullptr || pointer.get_deleter() != &free_device_memory) {
    return;  // empty, or memory that somebody else frees
  }
  const std::lock_guard lock(mutex_);
  Device& device = *devices_.at(static_cast<std::size_t>(device_of(address)));
  Block& block = device.blocks.at(address);
  if (std::find(block.users.begin(), block.users.end(), &user) == block.users.end()) {
    block.users.push_back(&user);
  }
}

void DeviceMemory::copy_data(void* destination, const void* source, std::size_t bytes) const {
  const int device = device_of(destination);
  current_stream(device).drain();
  std::memcpy(open_alias(destination), open_alias(source), bytes);
}

void DeviceMemory::emptyCache(c10::MempoolId_t /*pool*/) {
  for (int index = 0; index < kDeviceCount; ++index) {
    drain_device(index);
    const std::lock_guard lock(mutex_);
    Device& device = *devices_[static_cast<std::size_t>(index)];
    device.addresses.drop_pages();
    auto& reserved = device.stats.reserved_bytes;
    decrease(reserved, static_cast<std::size_t>(reserved[0].current -
                                                device.stats.allocated_bytes[0].current));
  }
}

c10::CachingDeviceAllocator::DeviceStats DeviceMemory::getDeviceStats(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  return devices_.at(static_cast<std::size_t>(device))->stats;
}

void DeviceMemory::resetAccumulatedStats(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  auto& stats = devices_.at(static_cast<std::size_t>(device))->stats;
  for (StatArray* const stat : {&stats.allocation, &stats.requested_bytes, &stats.allocated_bytes,
                                &stats.active_bytes, &stats.reserved_bytes}) {
    (*stat)[0].reset_accumulated();
    (*stat)[kLargePool].reset_accumulated();
  }
  stats.num_ooms = 0;
}

void DeviceMemory::resetPeakStats(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  auto& stats = devices_.at(static_cast<std::size_t>(device))->stats;
  for (StatArray* const stat : {&stats.allocation, &stats.requested_bytes, &stats.allocated_bytes,
                                &stats.active_bytes, &stats.reserved_bytes}) {
    (*stat)[0].reset_peak();
    (*stat)[kLargePool].reset_peak();
  }
}

std::pair<std::size_t, std::size_t> DeviceMemory::getMemoryInfo(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  const Device& asked = *devices_.at(static_cast<std::size_t>(device));
  const auto used = static_cast<std::size_t>(asked.stats.allocated_bytes[0].current);
  return {asked.limit - std::min(used, asked.limit), asked.limit};
}

void DeviceMemory::set_limit(int device, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  devices_.at(static_cast<std::size_t>(device))->limit = bytes;
}

void register_device_memory() {
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &DeviceMemory::get());
}

}  // namespace stand_in
