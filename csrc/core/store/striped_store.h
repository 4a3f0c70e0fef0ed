// Bytes at offsets, on one file or block device a path, striped over them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "../aio/io_engine.h"
#include "../aio/queues/cufile.h"
#include "byte_store.h"
#include "extent_arena.h"
#include "sector_checksums.h"
#include "storage_backend.h"

namespace zero_ext::core {

struct StripedStoreOptions {
  std::int64_t stripe_bytes = 1 << 20;  // a multiple of the store's alignment
  bool checksum = false;                // remember the CRC32C of every sector written, verify reads
  bool block_devices = false;           // the paths are block devices to overwrite, not new files
};

// Whose memory a transfer fills or empties.
enum class MemoryKind { kHost, kDevice };

struct StripedStoreStats {
  struct Device {
    std::string path;
    std::string direct_io_refusal;  // empty if transfers go past the page cache
  };
  std::vector<Device> devices;
  std::int64_t capacity = 0;
  std::int64_t live_bytes = 0;    // of allocated extents
  std::int64_t largest_free = 0;  // the largest extent that allocate() can make
  std::int64_t bytes_read = 0;    // asked for by read and write so far; reserving does not count
  std::int64_t bytes_written = 0;
};

// All methods may be called from any thread; failures throw std::runtime_error. Transfers lie
// inside one extent; an extent must not be released while one of its transfers is under way.
class StripedStore final : public ByteStore {
 public:
  // Creates the files or claims the devices; their space is zero until reserve().
  StripedStore(std::shared_ptr<IoEngine> engine, const std::vector<std::string>& paths,
               const StripedStoreOptions& options);

  // Removes the files. Transfers that nobody waited for end by themselves.
  ~StripedStore() override = default;
  StripedStore(const StripedStore&) = delete;
  StripedStore& operator=(const StripedStore&) = delete;

  // Raises the capacity to `total_bytes`, rounded up to the alignment. The space is allocated and
  // written with zeros here, so that running out of it is an error now, with nothing changed, and
  // no later write has to make blocks. Without `zeros` it is only allocated: for what is written
  // once and read once, writing it twice costs more than it saves.
  void reserve(std::int64_t total_bytes, bool zeros = true);

  // As those of ExtentArena.
  std::int64_t allocate(std::int64_t bytes);
  void release(std::int64_t offset);

  // Offsets and lengths are multiples of it. Memory should be; where the device cannot reach it,
  // the engine goes through the page cache.
  std::int64_t alignment() const override { return alignment_; }

  std::shared_ptr<TransferHandle> read(std::int64_t offset, std::span<std::byte> into) override {
    return read(offset, into, nullptr);
  }
  std::shared_ptr<TransferHandle> write(std::int64_t offset,
                                        std::span<const std::byte> from) override {
    return write(offset, from, nullptr);
  }

  // `owner` keeps the memory as long as the transfer needs it.
  std::shared_ptr<TransferHandle> read(std::int64_t offset, std::span<std::byte> into,
                                       std::shared_ptr<void> owner,
                                       MemoryKind kind = MemoryKind::kHost);
  std::shared_ptr<TransferHandle> write(std::int64_t offset, std::span<const std::byte> from,
                                        std::shared_ptr<void> owner,
                                        MemoryKind kind = MemoryKind::kHost);

  // Has transfers of kDevice go by cuFile, for the GPU that is current in this thread; until then,
  // and after close_direct(), they are refused. Throws where reads are verified, which the host
  // does, and as cufile_mover().
  void open_direct(std::shared_ptr<CuFileDriver> driver);
  void close_direct();

  StripedStoreStats stats() const;

  // For tests of what lies above.
  void inject_fault(FaultRule rule) { engine_->inject_fault(rule); }

 private:
  struct Layout;

  std::shared_ptr<IoEngine> engine_of(MemoryKind kind) const;
  void check_range(const char* action, std::int64_t offset, std::size_t bytes) const;
  void grow_devices(std::int64_t from, std::int64_t to, bool zeros);
  void shrink_devices(std::int64_t to) noexcept;

  std::vector<std::unique_ptr<StorageBackend>> backends_;
  std::shared_ptr<const Layout> layout_;
  std::int64_t alignment_;
  std::shared_ptr<SectorChecksums> checksums_;  // null if reads are not verified
  std::mutex growing_;
  mutable std::mutex mutex_;
  ExtentArena arena_;
  std::atomic<std::int64_t> bytes_read_ = 0;
  std::atomic<std::int64_t> bytes_written_ = 0;
  // Goes first, and with it all transfers if nobody else holds it: a device that is no longer
  // claimed must not be written to.
  std::shared_ptr<IoEngine> engine_;
  std::shared_ptr<IoEngine> direct_;  // null if there are no transfers of device memory
};

}  // namespace zero_ext::core
