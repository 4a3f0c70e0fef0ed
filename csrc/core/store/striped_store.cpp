#include "striped_store.h"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <exception>
#include <functional>
#include <stdexcept>
#include <utility>

#include "../base/error_text.h"
#include "../base/host_memory.h"
#include "../base/rounding.h"
#include "striping.h"

namespace zero_ext::core {

namespace {

constexpr std::int64_t kZeroChunkBytes = 8 << 20;
constexpr std::size_t kZeroChunksInFlight = 8;

// One handle for a transfer that is spread over several devices. Complete when all transfers are;
// failed if any is, with the first transfer's reason.
class StripedTransferHandle final : public TransferHandle {
 public:
  // `check` runs once, on the first thread that waits, after all transfers have succeeded; what it
  // throws is the outcome. `owner` keeps the memory that it looks at.
  StripedTransferHandle(std::function<void()> check, std::shared_ptr<void> owner)
      : check_(std::move(check)), owner_(std::move(owner)) {}

  // Before the handle is handed out.
  void add(std::shared_ptr<TransferHandle> transfer) { transfers_.push_back(std::move(transfer)); }

  const auto& transfers() const { return transfers_; }
  bool done() const override { return all_done(transfers_); }

  void wait() override {
    const std::lock_guard lock(mutex_);
    if (!waited_) {
      outcome_ = wait_for_all(transfers_);
      if (outcome_ == nullptr) outcome_ = check_outcome();
      waited_ = true;
      check_ = nullptr;
      owner_.reset();
    }
    if (outcome_ != nullptr) std::rethrow_exception(outcome_);
  }

 private:
  std::exception_ptr check_outcome() const {
    try {
      if (check_ != nullptr) check_();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  std::vector<std::shared_ptr<TransferHandle>> transfers_;
  std::function<void()> check_;
  std::shared_ptr<void> owner_;
  std::mutex mutex_;
  bool waited_ = false;
  std::exception_ptr outcome_;
};

// Returns when all of [offset, offset + bytes) was written; throws what the engine throws, with no
// transfer under way any more.
void write_zeros(IoEngine& engine, const std::shared_ptr<IoFile>& file, std::int64_t offset,
                 std::int64_t bytes) {
  const std::int64_t chunk_bytes = std::min(bytes, kZeroChunkBytes);
  if (chunk_bytes <= 0) return;
  const std::shared_ptr<void> zeros(allocate_host(chunk_bytes), [](void* memory) {
    if (memory != nullptr) free_host(memory);
  });
  require(zeros != nullptr, "store: no memory for ", chunk_bytes, " bytes of zeros. Free some.");
  const auto* const data = static_cast<const std::byte*>(zeros.get());
  std::deque<std::shared_ptr<TransferHandle>> pending;
  try {
    for (std::int64_t done = 0; done < bytes; done += chunk_bytes) {
      if (pending.size() == kZeroChunksInFlight) {
        pending.front()->wait();
        pending.pop_front();
      }
      const auto length = static_cast<std::size_t>(std::min(chunk_bytes, bytes - done));
      pending.push_back(engine.write(file, offset + done, std::span(data, length), zeros));
    }
  } catch (...) {
    static_cast<void>(wait_for_all(pending));  // the first error is on its way already
    throw;
  }
  if (const std::exception_ptr error = wait_for_all(pending)) std::rethrow_exception(error);
}

}  // namespace

// Where every byte of the address space is. Tickets share it, for they may outlive the store.
struct StripedStore::Layout {
  struct Device {
    std::shared_ptr<IoFile> file;
    std::int64_t base;
  };

  Striping striping;
  std::vector<Device> devices;

  // Has `transfer` put one part for each device's piece of [offset, offset + bytes) on the handle.
  template <class StartTransfer>
  void split(StripedTransferHandle& handle, std::int64_t offset, std::size_t bytes,
             const StartTransfer& transfer) const {
    try {
      for (const StripeExtent& extent :
           striping.extents(offset, static_cast<std::int64_t>(bytes))) {
        const Device& device = devices[extent.device];
        handle.add(transfer(device.file, device.base + extent.device_offset,
                            static_cast<std::size_t>(extent.transfer_offset),
                            static_cast<std::size_t>(extent.bytes)));
      }
    } catch (...) {
      // The caller gets no handle, so its memory must be free again.
      static_cast<void>(wait_for_all(handle.transfers()));
      throw;
    }
  }

  std::string text(const ChecksumMismatch& mismatch) const {
    const StripeExtent extent = striping.extents(mismatch.offset, 1).front();
    const Device& device = devices[extent.device];
    char values[64];
    std::snprintf(values, sizeof values, "expected CRC32C 0x%08x, got 0x%08x", mismatch.expected,
                  mismatch.found);
    return "store: bytes of '" + device.file->path() + "' at offset " +
           std::to_string(device.base + extent.device_offset) + ": " + values + " (store offset " +
           std::to_string(mismatch.offset) +
           "), so the device or its driver damaged what was written. Load a checkpoint and replace "
           "the device.";
  }
};

namespace {

std::int64_t checked_alignment(const std::vector<std::unique_ptr<StorageBackend>>& backends,
                               std::int64_t stripe_bytes) {
  std::int64_t alignment = SectorChecksums::kSectorBytes;
  for (const auto& backend : backends) {
    alignment = std::max(alignment, backend->file()->alignment());
  }
  require(stripe_bytes >= 1 && stripe_bytes % alignment == 0,
          "store: stripe_bytes: expected a positive multiple of ", alignment, ", got ",
          stripe_bytes, ". Round it up.");
  return alignment;
}

std::vector<std::unique_ptr<StorageBackend>> make_backends(const std::vector<std::string>& paths,
                                                           bool block_devices) {
  std::vector<std::unique_ptr<StorageBackend>> backends;
  for (const std::string& path : paths) {
    backends.push_back(block_devices ? make_block_device_backend(path) : make_file_backend(path));
  }
  return backends;
}

}  // namespace

StripedStore::StripedStore(std::shared_ptr<IoEngine> engine, const std::vector<std::string>& paths,
                           const StripedStoreOptions& options)
    : backends_(make_backends(paths, options.block_devices)),
      alignment_(checked_alignment(backends_, options.stripe_bytes)),
      checksums_(options.checksum ? std::make_shared<SectorChecksums>() : nullptr),
      arena_(0, alignment_),
      engine_(std::move(engine)) {
  Layout layout{Striping(paths.size(), options.stripe_bytes), {}};
  for (const auto& backend : backends_)
    layout.devices.push_back({backend->file(), backend->base()});
  layout_ = std::make_shared<const Layout>(std::move(layout));
}

void StripedStore::reserve(std::int64_t total_bytes, bool zeros) {
  const std::lock_guard growing(growing_);
  const std::int64_t from = stats().capacity;
  // Sizes that no device has are not rounded up: that could overflow.
  constexpr std::int64_t kLargest = std::int64_t{1} << 56;
  require(total_bytes >= from && total_bytes <= kLargest,
          "store: expected a capacity between the present ", from, " bytes and 2^56, got ",
          total_bytes, ". Pass a larger one.");
  const std::int64_t to = round_up(total_bytes, alignment_);
  try {
    grow_devices(from, to, zeros);
  } catch (...) {
    shrink_devices(from);
    throw;
  }
  if (checksums_ != nullptr) checksums_->grow(to);
  const std::lock_guard lock(mutex_);
  arena_.grow(to);
}

void StripedStore::grow_devices(std::int64_t from, std::int64_t to, bool zeros) {
  // All are asked for space before any is written to.
  for (std::size_t i = 0; i < backends_.size(); ++i) {
    backends_[i]->resize(layout_->striping.device_bytes(i, from),
                         layout_->striping.device_bytes(i, to));
  }
  for (std::size_t i = 0; zeros && i < backends_.size(); ++i) {
    const std::int64_t begin = layout_->striping.device_bytes(i, from);
    write_zeros(*engine_, backends_[i]->file(), backends_[i]->base() + begin,
                layout_->striping.device_bytes(i, to) - begin);
  }
}

void StripedStore::shrink_devices(std::int64_t to) noexcept {
  for (std::size_t i = 0; i < backends_.size(); ++i) {
    const std::int64_t bytes = layout_->striping.device_bytes(i, to);
    try {
      backends_[i]->resize(bytes, bytes);
    } catch (const std::exception&) {  // the reason to cut is what the caller hears of
    }
  }
}

std::int64_t StripedStore::allocate(std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  return arena_.allocate(bytes);
}

void StripedStore::release(std::int64_t offset) {
  const std::lock_guard lock(mutex_);
  arena_.release(offset);
}

void StripedStore::open_direct(std::shared_ptr<CuFileDriver> driver) {
  require(checksums_ == nullptr,
          "store: checksums are verified in host memory, which direct transfers leave out. Set "
          "offload.checksum to false.");
  std::vector<std::shared_ptr<IoFile>> files;
  for (const auto& backend : backends_) files.push_back(backend->file());
  auto direct = IoEngine::make(engine_->options(), cufile_mover(std::move(driver), files));
  const std::lock_guard lock(mutex_);
  direct_ = std::move(direct);
}

void StripedStore::close_direct() {
  std::unique_lock lock(mutex_);
  const std::shared_ptr<IoEngine> ended = std::exchange(direct_, nullptr);
  lock.unlock();
}

std::shared_ptr<IoEngine> StripedStore::engine_of(MemoryKind kind) const {
  if (kind == MemoryKind::kHost) return engine_;
  const std::lock_guard lock(mutex_);
  require(direct_ != nullptr,
          "store: expected host memory, got device memory. Open the store for direct transfers.");
  return direct_;
}

std::shared_ptr<TransferHandle> StripedStore::read(std::int64_t offset, std::span<std::byte> into,
                                                   std::shared_ptr<void> owner, MemoryKind kind) {
  const auto engine = engine_of(kind);
  check_range("read", offset, into.size());
  std::function<void()> check;
  if (checksums_ != nullptr) {
    check = [checksums = checksums_, layout = layout_, offset, into] {
      const auto mismatch = checksums->verify(offset, into);
      if (mismatch) throw std::runtime_error(layout->text(*mismatch));
    };
  }
  auto handle = std::make_shared<StripedTransferHandle>(std::move(check), owner);
  layout_->split(*handle, offset, into.size(),
                 [&](const auto& file, std::int64_t at, std::size_t from, std::size_t bytes) {
                   return engine->read(file, at, into.subspan(from, bytes), owner);
                 });
  bytes_read_ += static_cast<std::int64_t>(into.size());
  return handle;
}

std::shared_ptr<TransferHandle> StripedStore::write(std::int64_t offset,
                                                    std::span<const std::byte> from,
                                                    std::shared_ptr<void> owner, MemoryKind kind) {
  const auto engine = engine_of(kind);
  check_range("write", offset, from.size());
  if (checksums_ != nullptr) checksums_->record(offset, from);
  auto handle = std::make_shared<StripedTransferHandle>(nullptr, owner);
  layout_->split(*handle, offset, from.size(),
                 [&](const auto& file, std::int64_t at, std::size_t begin, std::size_t bytes) {
                   return engine->write(file, at, from.subspan(begin, bytes), owner);
                 });
  bytes_written_ += static_cast<std::int64_t>(from.size());
  return handle;
}

void StripedStore::check_range(const char* action, std::int64_t offset, std::size_t bytes) const {
  const std::string range =
      " of " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset);
  const auto length = static_cast<std::int64_t>(bytes);
  require(offset % alignment_ == 0 && length % alignment_ == 0, "store: ", action, range,
          ": expected multiples of ", alignment_, ". Round both.");
  const std::lock_guard lock(mutex_);
  if (!arena_.contains(offset, length)) {
    throw make_error("store: ", action, range,
                     ": expected a range inside one allocated extent. Allocate it before.");
  }
}

StripedStoreStats StripedStore::stats() const {
  StripedStoreStats stats;
  for (const auto& device : layout_->devices) {
    stats.devices.push_back({device.file->path(), device.file->direct_io_refusal()});
  }
  stats.bytes_read = bytes_read_;
  stats.bytes_written = bytes_written_;
  const std::lock_guard lock(mutex_);
  stats.capacity = arena_.capacity();
  stats.live_bytes = arena_.live_bytes();
  stats.largest_free = arena_.largest_free();
  return stats;
}

}  // namespace zero_ext::core
