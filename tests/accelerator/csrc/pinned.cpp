#include "pinned.h"

#include <ATen/core/CachingHostAllocator.h>
#include <sys/mman.h>

#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "memory_space.h"
#include "streams.h"

namespace stand_in {
namespace {

struct PinnedMemory {
  std::mutex mutex;
  std::map<const std::byte*, std::size_t> ranges;
  std::vector<Range> freed;         // by the allocator's users; streams may still use them
  std::int64_t until_refusal = -1;  // negative: never
};

PinnedMemory& pinned_memory() {
  // Never destroyed: it outlives every tensor.
  static PinnedMemory* const leaked = std::make_unique<PinnedMemory>().release();
  return *leaked;
}

void finish_uses(const Range& range) {
  if (in_use(range)) {
    for (int device = 0; device < kDeviceCount; ++device) {
      for (std::int64_t id = 0; id < kStreamsOfDevice; ++id) {
        Stream& stream = stream_of(device, id);
        stream.await(stream.ticket());
      }
    }
  }
}

// Gives the system back what was freed and no stream uses any more.
void return_unused() {
  PinnedMemory& all = pinned_memory();
  std::vector<Range> freed;
  {
    const std::lock_guard lock(all.mutex);
    freed.swap(all.freed);
  }
  std::erase_if(freed, [](const Range& range) {
    return !in_use(range) && munmap(const_cast<std::byte*>(range.begin), range.bytes) == 0;
  });
  const std::lock_guard lock(all.mutex);
  all.freed.insert(all.freed.end(), freed.begin(), freed.end());
}

// Nobody waits: as with a GPU's allocator, the memory stays for the streams that still use it.
void free_pinned(void* address) {
  {
    PinnedMemory& all = pinned_memory();
    const std::lock_guard lock(all.mutex);
    const auto found = all.ranges.find(static_cast<const std::byte*>(address));
    all.freed.push_back({found->first, found->second});
    all.ranges.erase(found);
  }
  return_unused();
}

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    return_unused();
    if (bytes == 0) {
      return {nullptr, cpu};
    }
    void* const address =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(address != MAP_FAILED, "stand_in: no pinned host memory for ", bytes, " bytes");
    try {
      pin(address, bytes);
    } catch (...) {
      munmap(address, bytes);
      throw;
    }
    std::memset(address, kPoison, bytes);
    return {address, address, &free_pinned, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    std::memcpy(destination, source, bytes);
  }
  // Copies name the host memory they use: it stays until they are done.
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

bool is_pinned(const void* address) {
  PinnedMemory& all = pinned_memory();
  const std::lock_guard lock(all.mutex);
  const auto* const bytes = static_cast<const std::byte*>(address);
  const auto next = all.ranges.upper_bound(bytes);
  if (next == all.ranges.begin()) {
    return false;
  }
  const auto& [begin, length] = *std::prev(next);
  return bytes < begin + length;
}

void pin(const void* address, std::size_t bytes) {
  PinnedMemory& all = pinned_memory();
  const std::lock_guard lock(all.mutex);
  TORCH_CHECK(all.until_refusal != 0, "stand_in: pinning ", bytes, " bytes of host memory refused");
  all.until_refusal -= all.until_refusal > 0 ? 1 : 0;
  const Range wanted{static_cast<const std::byte*>(address), bytes};
  for (const auto& [begin, length] : all.ranges) {
    TORCH_CHECK(!wanted.overlaps({begin, length}), "stand_in: host memory is already pinned");
  }
  all.ranges.emplace(wanted.begin, bytes);
}

void unpin(const void* address) {
  PinnedMemory& all = pinned_memory();
  Range range{static_cast<const std::byte*>(address), 0};
  {
    const std::lock_guard lock(all.mutex);
    const auto found = all.ranges.find(range.begin);
    TORCH_CHECK(found != all.ranges.end(), "stand_in: no pinned memory begins at ", address);
    range.bytes = found->second;
    all.ranges.erase(found);
  }
  finish_uses(range);
}

void refuse_pinned(std::int64_t after) {
  PinnedMemory& all = pinned_memory();
  const std::lock_guard lock(all.mutex);
  all.until_refusal = after;
}

std::size_t pinned_bytes() {
  PinnedMemory& all = pinned_memory();
  const std::lock_guard lock(all.mutex);
  std::size_t sum = 0;
  for (const auto& [begin, length] : all.ranges) {
    sum += length;
  }
  return sum;
}

void register_pinned_memory() {
  static PinnedAllocator pinned;
  at::setHostAllocator(at::DeviceType::PrivateUse1, &pinned);
}

at::Allocator* pinned_allocator() { return at::getHostAllocator(at::DeviceType::PrivateUse1); }

}  // namespace stand_in
