#include "host_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace zero_ext::core {
namespace {

constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;

struct Mapping {
  std::int64_t bytes;  // asked for
  std::size_t length;  // mapped
};

class Registry {
 public:
  void insert(void* address, Mapping mapping) {
    const std::lock_guard lock(mutex_);
    mappings_.emplace(address, mapping);
    bytes_ += mapping.bytes;
  }

  // Length of the mapping at `address`, which is forgotten; 0 when there is none.
  std::size_t remove(void* address) {
    const std::lock_guard lock(mutex_);
    const auto found = mappings_.find(address);
    if (found == mappings_.end()) return 0;
    const Mapping mapping = found->second;
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
  std::unordered_map<void*, Mapping> mappings_;
  std::int64_t bytes_ = 0;
};

// Never destroyed: tensors may outlive static destructors.
Registry& registry() {
  static auto* const instance = std::make_unique<Registry>().release();
  return *instance;
}

}  // namespace

void* allocate_host(std::int64_t bytes) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto wanted = static_cast<std::uintptr_t>(bytes);
  if (wanted > UINTPTR_MAX / 2) {
    errno = ENOMEM;
    return nullptr;
  }
  const std::uintptr_t length = (wanted + page - 1) / page * page;
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
