#include "striped_store.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <utility>

#include "striped_transfer_handle.h"
#include "striping.h"
#include "zero_fill.h"

namespace zero_ext::core {

// Where every byte of the address space is. Tickets share it, for they may outlive the store.
struct Store::Layout {
  struct Device {
    std::shared_ptr<File> file;
    std::int64_t base;
  };

  Striping striping;
  std::vector<Device> devices;

  // Has `transfer` put one part for each device's piece of [offset, offset + bytes) on the ticket.
  template <class TransferPiece>
  void split(StripedTicket& ticket, std::int64_t offset, std::size_t bytes,
             const TransferPiece& transfer) const {
    try {
      for (const StripePiece& piece : striping.pieces(offset, static_cast<std::int64_t>(bytes))) {
        const Device& device = devices[piece.device];
        ticket.add(transfer(device.file, device.base + piece.device_offset,
                            static_cast<std::size_t>(piece.transfer_offset),
                            static_cast<std::size_t>(piece.bytes)));
      }
    } catch (...) {
      ticket.wait_for_parts();  // the caller gets no ticket, so its memory must be free again
      throw;
    }
  }

  std::string text(const ChecksumMismatch& mismatch) const {
    const StripePiece piece = striping.pieces(mismatch.offset, 1).front();
    const Device& device = devices[piece.device];
    char values[64];
    std::snprintf(values, sizeof values, "0x%08x expected, 0x%08x found", mismatch.expected,
                  mismatch.found);
    return "store: the bytes read from '" + device.file->path() + "' at offset " +
           std::to_string(device.base + piece.device_offset) +
           " are not those that were written: CRC32C " + values + " (store offset " +
           std::to_string(mismatch.offset) +
           "); the device or its driver damaged them: go back to a checkpoint";
  }
};

namespace {

std::int64_t checked_alignment(const std::vector<std::unique_ptr<Backing>>& backings,
                               std::int64_t stripe_bytes) {
  std::int64_t alignment = SectorChecksums::kSectorBytes;
  for (const auto& backing : backings) {
    alignment = std::max(alignment, backing->file()->alignment());
  }
  if (stripe_bytes < 1 || stripe_bytes % alignment != 0) {
    throw std::runtime_error("store: stripe_bytes is " + std::to_string(stripe_bytes) +
                             "; a positive multiple of " + std::to_string(alignment) + " wanted");
  }
  return alignment;
}

std::vector<std::unique_ptr<Backing>> make_backings(const std::vector<std::string>& paths,
                                                    bool block_devices) {
  std::vector<std::unique_ptr<Backing>> backings;
  for (const std::string& path : paths) {
    backings.push_back(block_devices ? make_device_backing(path) : make_file_backing(path));
  }
  return backings;
}

}  // namespace

Store::Store(std::shared_ptr<Engine> engine, const std::vector<std::string>& paths,
             const StoreOptions& options)
    : backings_(make_backings(paths, options.block_devices)),
      alignment_(checked_alignment(backings_, options.stripe_bytes)),
      checksums_(options.checksum ? std::make_shared<SectorChecksums>() : nullptr),
      arena_(0, alignment_),
      engine_(std::move(engine)) {
  Layout layout{Striping(paths.size(), options.stripe_bytes), {}};
  for (const auto& backing : backings_)
    layout.devices.push_back({backing->file(), backing->base()});
  layout_ = std::make_shared<const Layout>(std::move(layout));
}

void Store::reserve(std::int64_t total_bytes, bool zeros) {
  const std::lock_guard growing(growing_);
  const std::int64_t from = facts().capacity;
  // Sizes that no device has are not rounded up: that could overflow.
  constexpr std::int64_t kLargest = std::int64_t{1} << 56;
  if (total_bytes < from || total_bytes > kLargest) {
    throw std::runtime_error("store: a capacity of " + std::to_string(total_bytes) +
                             " bytes wanted; it is " + std::to_string(from) +
                             " and can only grow, to 2^56 at most");
  }
  const std::int64_t to = (total_bytes + alignment_ - 1) / alignment_ * alignment_;
  try {
    grow_devices(from, to, zeros);
  } catch (...) {
    cut_devices(from);
    throw;
  }
  if (checksums_ != nullptr) checksums_->grow(to);
  const std::lock_guard lock(mutex_);
  arena_.grow(to);
}

void Store::grow_devices(std::int64_t from, std::int64_t to, bool zeros) {
  // All are asked for space before any is written to.
  for (std::size_t i = 0; i < backings_.size(); ++i) {
    backings_[i]->resize(layout_->striping.device_bytes(i, from),
                         layout_->striping.device_bytes(i, to));
  }
  for (std::size_t i = 0; zeros && i < backings_.size(); ++i) {
    const std::int64_t begin = layout_->striping.device_bytes(i, from);
    write_zeros(*engine_, backings_[i]->file(), backings_[i]->base() + begin,
                layout_->striping.device_bytes(i, to) - begin);
  }
}

void Store::cut_devices(std::int64_t to) noexcept {
  for (std::size_t i = 0; i < backings_.size(); ++i) {
    const std::int64_t bytes = layout_->striping.device_bytes(i, to);
    try {
      backings_[i]->resize(bytes, bytes);
    } catch (const std::exception&) {  // the reason to cut is what the caller hears of
    }
  }
}

std::int64_t Store::allocate(std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  return arena_.allocate(bytes);
}

void Store::release(std::int64_t offset) {
  const std::lock_guard lock(mutex_);
  arena_.release(offset);
}

void Store::open_direct(std::shared_ptr<CuFileDriver> driver) {
  if (checksums_ != nullptr) {
    throw std::runtime_error("checksums are verified in host memory (offload.checksum)");
  }
  std::vector<std::shared_ptr<File>> files;
  for (const auto& backing : backings_) files.push_back(backing->file());
  auto direct = Engine::make(engine_->options(), cufile_mover(std::move(driver), files));
  const std::lock_guard lock(mutex_);
  direct_ = std::move(direct);
}

void Store::close_direct() {
  std::unique_lock lock(mutex_);
  const std::shared_ptr<Engine> ended = std::exchange(direct_, nullptr);
  lock.unlock();
}

std::shared_ptr<Engine> Store::engine_of(MemoryKind kind) const {
  if (kind == MemoryKind::kHost) return engine_;
  const std::lock_guard lock(mutex_);
  if (direct_ == nullptr) {
    throw std::runtime_error("store: a transfer of device memory; the store is not open for it");
  }
  return direct_;
}

std::shared_ptr<Ticket> Store::read(std::int64_t offset, std::span<std::byte> into,
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
  auto ticket = std::make_shared<StripedTicket>(std::move(check), owner);
  layout_->split(*ticket, offset, into.size(),
                 [&](const auto& file, std::int64_t at, std::size_t from, std::size_t bytes) {
                   return engine->read(file, at, into.subspan(from, bytes), owner);
                 });
  bytes_read_ += static_cast<std::int64_t>(into.size());
  return ticket;
}

std::shared_ptr<Ticket> Store::write(std::int64_t offset, std::span<const std::byte> from,
                                     std::shared_ptr<void> owner, MemoryKind kind) {
  const auto engine = engine_of(kind);
  check_range("write", offset, from.size());
  if (checksums_ != nullptr) checksums_->record(offset, from);
  auto ticket = std::make_shared<StripedTicket>(nullptr, owner);
  layout_->split(*ticket, offset, from.size(),
                 [&](const auto& file, std::int64_t at, std::size_t begin, std::size_t bytes) {
                   return engine->write(file, at, from.subspan(begin, bytes), owner);
                 });
  bytes_written_ += static_cast<std::int64_t>(from.size());
  return ticket;
}

void Store::check_range(const char* action, std::int64_t offset, std::size_t bytes) const {
  const std::string wanted = std::string("store: ") + action + " of " + std::to_string(bytes) +
                             " bytes at offset " + std::to_string(offset) + ": ";
  const auto length = static_cast<std::int64_t>(bytes);
  if (offset % alignment_ != 0 || length % alignment_ != 0) {
    throw std::runtime_error(wanted + "offset and length must be multiples of " +
                             std::to_string(alignment_));
  }
  const std::lock_guard lock(mutex_);
  if (!arena_.holds(offset, length)) {
    throw std::runtime_error(wanted + "it does not lie inside one allocated extent");
  }
}

StoreFacts Store::facts() const {
  StoreFacts facts;
  for (const auto& device : layout_->devices) {
    facts.devices.push_back({device.file->path(), device.file->why_not_direct()});
  }
  facts.bytes_read = bytes_read_;
  facts.bytes_written = bytes_written_;
  const std::lock_guard lock(mutex_);
  facts.capacity = arena_.capacity();
  facts.live_bytes = arena_.live_bytes();
  facts.largest_free = arena_.largest_free();
  return facts;
}

}  // namespace zero_ext::core
