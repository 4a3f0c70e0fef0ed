#include "zero_fill.h"

#include <algorithm>
#include <deque>
#include <span>
#include <stdexcept>
#include <string>

#include "../base/host_memory.h"

namespace zero_ext::core {
namespace {

constexpr std::int64_t kZeroChunkBytes = 8 << 20;
constexpr std::size_t kZeroChunksInFlight = 8;

// On an error too, no transfer outlives this.
class PendingTransfers {
 public:
  PendingTransfers() = default;
  ~PendingTransfers() {
    for (const auto& handle : handles_) {
      try {
        handle->wait();
      } catch (const std::exception&) {  // the first error is on its way already
      }
    }
  }
  PendingTransfers(const PendingTransfers&) = delete;
  PendingTransfers& operator=(const PendingTransfers&) = delete;

  std::size_t count() const { return handles_.size(); }
  void add(std::shared_ptr<TransferHandle> handle) { handles_.push_back(std::move(handle)); }
  void wait_for_oldest() {
    const auto handle = std::move(handles_.front());
    handles_.pop_front();
    handle->wait();
  }

 private:
  std::deque<std::shared_ptr<TransferHandle>> handles_;
};

}  // namespace

void write_zeros(IoEngine& engine, const std::shared_ptr<IoFile>& file, std::int64_t offset,
                 std::int64_t bytes) {
  const std::int64_t chunk_bytes = std::min(bytes, kZeroChunkBytes);
  if (chunk_bytes <= 0) return;
  const std::shared_ptr<void> zeros(allocate_host(chunk_bytes), [](void* memory) {
    if (memory != nullptr) free_host(memory);
  });
  if (zeros == nullptr) {
    throw std::runtime_error("store: no memory for " + std::to_string(chunk_bytes) +
                             " bytes of zeros. Free some.");
  }
  const auto* const data = static_cast<const std::byte*>(zeros.get());
  PendingTransfers pending;
  for (std::int64_t done = 0; done < bytes; done += chunk_bytes) {
    if (pending.count() == kZeroChunksInFlight) pending.wait_for_oldest();
    const auto length = static_cast<std::size_t>(std::min(chunk_bytes, bytes - done));
    pending.add(engine.write(file, offset + done, std::span(data, length), zeros));
  }
  while (pending.count() > 0) pending.wait_for_oldest();
}

}  // namespace zero_ext::core
