#include "memory_space.h"

#include <sys/mman.h>

#include <array>
#include <cerrno>
#include <iterator>
#include <system_error>

namespace stand_in {
namespace {

std::byte* reserve(int protection) {
  void* const address = mmap(nullptr, kDeviceBytes * kDeviceCount, protection,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "stand_in: addresses for the device");
  }
  return static_cast<std::byte*>(address);
}

// Two ranges at a fixed distance: nothing is ever unprotected, so no thread can race with it.
struct Spaces {
  std::byte* closed = reserve(PROT_NONE);
  std::byte* open = reserve(PROT_READ | PROT_WRITE);
};

const Spaces& spaces() {
  static const Spaces both;
  return both;
}

}  // namespace

int device_of(const void* address) {
  const auto offset = static_cast<const std::byte*>(address) - spaces().closed;
  if (offset < 0 || offset >= static_cast<std::ptrdiff_t>(kDeviceBytes * kDeviceCount)) {
    return -1;
  }
  return static_cast<int>(static_cast<std::size_t>(offset) / kDeviceBytes);
}

std::byte* open_alias(const void* address) {
  auto* const bytes = static_cast<std::byte*>(const_cast<void*>(address));
  return device_of(address) < 0 ? bytes : spaces().open + (bytes - spaces().closed);
}

AddressPool::AddressPool(int device) {
  // The first granule stays unused: no tensor has the address that ends another device's memory.
  std::byte* const base = spaces().closed + kDeviceBytes * static_cast<std::size_t>(device);
  free_.emplace(base + kGranule, kDeviceBytes - kGranule);
}

std::byte* AddressPool::take(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    const auto [address, length] = *range;
    if (length < bytes) {
      continue;
    }
    free_.erase(range);
    if (length > bytes) {
      free_.emplace(address + bytes, length - bytes);
    }
    return address;
  }
  return nullptr;
}

void AddressPool::give(std::byte* address, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  auto range = free_.emplace(address, bytes).first;
  const auto next = std::next(range);
  if (next != free_.end() && address + bytes == next->first) {
    range->second += next->second;
    free_.erase(next);
  }
  if (range != free_.begin()) {
    const auto previous = std::prev(range);
    if (previous->first + previous->second == address) {
      previous->second += range->second;
      free_.erase(range);
    }
  }
}

void AddressPool::drop_pages() {
  constexpr std::uintptr_t page = 4096;
  const std::lock_guard lock(mutex_);
  for (const auto& [address, length] : free_) {
    const auto begin = reinterpret_cast<std::uintptr_t>(open_alias(address));
    const auto first = (begin + page - 1) / page * page;
    const auto end = (begin + length) / page * page;
    if (first < end) {
      madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
    }
  }
}

}  // namespace stand_in

void* stand_in_open_alias(const void* address) { return stand_in::open_alias(address); }
