#include "host_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "unique_fd.h"

namespace zero_ext::core {
namespace {

constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;

struct HostMapping {
  std::int64_t bytes;  // asked for
  std::size_t length;  // mapped
};

class MappingRegistry {
 public:
  void insert(void* address, HostMapping mapping) {
    const std::lock_guard lock(mutex_);
    mappings_.emplace(address, mapping);
    bytes_ += mapping.bytes;
  }

  // Length of the mapping at `address`, which is forgotten; 0 when there is none.
  std::size_t remove(void* address) {
    const std::lock_guard lock(mutex_);
    const auto found = mappings_.find(address);
    if (found == mappings_.end()) return 0;
    const HostMapping mapping = found->second;
    mappings_.erase(found);
    bytes_ -= mapping.bytes;
    return mapping.length;
  }

  std::int64_t bytes() const {
    const std::lock_guard lock(mutex_);
    return bytes_;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<void*, HostMapping> mappings_;
  std::int64_t bytes_ = 0;
};

// Never destroyed: tensors may outlive static destructors.
MappingRegistry& registry() {
  static auto* const instance = std::make_unique<MappingRegistry>().release();
  return *instance;
}

// A file without a name, of ones.
UniqueFd file_of_ones(std::size_t length) {
  UniqueFd file(memfd_create("zero_ext", MFD_CLOEXEC));
  if (!file.valid() || ftruncate(file.get(), static_cast<off_t>(length)) != 0) return {};
  void* const memory = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) return {};
  std::memset(memory, 0xFF, length);
  munmap(memory, length);
  return file;
}

}  // namespace

void* map_nan_filled_host(std::int64_t bytes) {
  // The kernel allows a process 65,530 mappings.
  constexpr std::uintptr_t kMaxMappings = 1024;
  const auto requested = static_cast<std::uintptr_t>(bytes);
  if (requested > UINTPTR_MAX / 2) {
    errno = ENOMEM;
    return nullptr;
  }
  std::uintptr_t chunk = kHugePage;
  while (requested / chunk >= kMaxMappings) chunk *= 2;
  const std::uintptr_t length = (requested + chunk - 1) / chunk * chunk;
  const UniqueFd file = file_of_ones(chunk);
  if (!file.valid()) return nullptr;
  void* const first = mmap(nullptr, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (first == MAP_FAILED) return nullptr;
  for (std::uintptr_t offset = 0; offset < length; offset += chunk) {
    // Private: a write stays in this process and reaches no other chunk.
    void* const chunk_address =
        mmap(static_cast<std::byte*>(first) + offset, chunk, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, file.get(), 0);
    if (chunk_address == MAP_FAILED) {
      const int error = errno;
      munmap(first, length);
      errno = error;
      return nullptr;
    }
  }
  registry().insert(first, {0, length});
  return first;
}

void* allocate_host(std::int64_t bytes) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto requested = static_cast<std::uintptr_t>(bytes);
  if (requested > UINTPTR_MAX / 2) {
    errno = ENOMEM;
    return nullptr;
  }
  const std::uintptr_t length = (requested + page - 1) / page * page;
  void* const raw =
      mmap(nullptr, length + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const auto first = reinterpret_cast<std::uintptr_t>(raw);
  const std::uintptr_t aligned = (first + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned > first) munmap(raw, aligned - first);
  const std::uintptr_t after = first + kHugePage - aligned;
  if (after > 0) munmap(reinterpret_cast<void*>(aligned + length), after);
  auto* const address = reinterpret_cast<void*>(aligned);
  // Advice only: a kernel without huge pages still gives correct memory.
  madvise(address, length, MADV_HUGEPAGE);
  registry().insert(address, {bytes, length});
  return address;
}

void free_host(void* address) {
  if (const std::size_t length = registry().remove(address)) munmap(address, length);
}

std::int64_t live_host_bytes() { return registry().bytes(); }

}  // namespace zero_ext::core
