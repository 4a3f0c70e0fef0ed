#include "chunk_pipeline.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "../base/error_text.h"

namespace zero_ext::core {
namespace {

std::string text(const StoreExtent& extent) {
  return join_text("[", extent.offset, ", ", extent.offset + extent.bytes, ")");
}

// Waits for a slot's transfers, all of them, then throws the first error.
void wait_for(const ChunkPipeline::Slot& slot) {
  if (const std::exception_ptr error = wait_for_all(slot.handles)) std::rethrow_exception(error);
}

std::span<std::byte> slice_of(const ChunkPipeline::Slot& slot, const ChunkTransfer& transfer) {
  return slot.memory.subspan(static_cast<std::size_t>(transfer.memory_offset),
                             static_cast<std::size_t>(transfer.bytes));
}

}  // namespace

void check_extents(std::vector<StoreExtent> extents, std::int64_t alignment) {
  for (const StoreExtent& extent : extents) {
    if (extent.offset < 0 || extent.offset % alignment != 0) {
      throw make_error("store: expected extents that begin at a multiple of ", alignment,
                       " bytes, got ", text(extent), ". Allocate it from the store.");
    }
  }
  std::erase_if(extents, [](const StoreExtent& each) { return each.bytes == 0; });
  std::ranges::sort(extents, {}, &StoreExtent::offset);
  for (std::size_t i = 1; i < extents.size(); ++i) {
    if (extents[i].offset < extents[i - 1].offset + extents[i - 1].bytes) {
      throw make_error("store: extents ", text(extents[i - 1]), " and ", text(extents[i]),
                       " overlap. Allocate one for each range.");
    }
  }
}

ChunkPipeline::ChunkPipeline(ByteStore& store, RingBuffer& ring,
                             std::function<std::optional<ChunkJob>()> source)
    : store_(store), ring_(ring), exclusive_(ring.exclusive()), source_(std::move(source)) {
  require(RingBuffer::kAlignment % store.alignment() == 0, "ring: expected an alignment of ",
          store.alignment(), " bytes for the store, got ", RingBuffer::kAlignment,
          ". Use a device with smaller sectors.");
}

ChunkPipeline::~ChunkPipeline() { drain(); }

ChunkPipeline::Slot* ChunkPipeline::next() {
  if (is_processing_) counters_.computing += Clock::now() - returned_at_;
  try {
    Slot* const slot = advance();
    returned_at_ = Clock::now();
    return slot;
  } catch (...) {
    drain();
    throw;
  }
}

ChunkPipeline::Slot* ChunkPipeline::advance() {
  if (is_processing_) {
    is_processing_ = false;
    Slot& finished = slots_[writing_++];
    start_writes(finished);
  }
  for (;;) {
    release_written();
    read_ahead();
    if (writing_ < slots_.size()) break;
    if (writing_ == 0) return nullptr;
    release_oldest();
  }
  Slot& slot = slots_[writing_];
  const Clock::time_point start = Clock::now();
  wait_for(slot);
  counters_.waiting_for_reads += Clock::now() - start;
  slot.handles = {};
  is_processing_ = true;
  return &slot;
}

void ChunkPipeline::read_ahead() {
  while (!exhausted_) {
    if (!pending_) pending_ = source_();
    if (!pending_) {
      exhausted_ = true;
      return;
    }
    const std::optional<std::span<std::byte>> memory = ring_.acquire(pending_->bytes);
    if (!memory) {
      if (!slots_.empty()) return;
      throw make_error("ring: expected at least the ", pending_->bytes, " bytes of a chunk, got ",
                       ring_.bytes(), ". Raise staging_buffer_bytes to the former.");
    }
    Slot& slot = slots_.emplace_back(Slot{*pending_, *memory, {}});
    pending_.reset();
    start_reads(slot);
  }
}

void ChunkPipeline::start_reads(Slot& slot) {
  for (std::size_t i = 0; i < slot.job.reads.size(); ++i) {
    const ChunkTransfer& transfer = slot.job.reads[i];
    if (transfer.bytes == 0) continue;
    slot.handles[i] = store_.read(transfer.offset, slice_of(slot, transfer));
    counters_.bytes_read += transfer.bytes;
    counters_.padding_read += transfer.padding;
  }
}

void ChunkPipeline::start_writes(Slot& slot) {
  for (std::size_t i = 0; i < slot.job.writes.size(); ++i) {
    const ChunkTransfer& transfer = slot.job.writes[i];
    if (transfer.bytes == 0) continue;
    slot.handles[i] = store_.write(transfer.offset, slice_of(slot, transfer));
    counters_.bytes_written += transfer.bytes;
    counters_.padding_written += transfer.padding;
  }
}

void ChunkPipeline::release_written() {
  while (writing_ > 0 && all_done(slots_.front().handles)) release_oldest();
}

void ChunkPipeline::release_oldest() {
  const Clock::time_point start = Clock::now();
  wait_for(slots_.front());
  counters_.waiting_for_writes += Clock::now() - start;
  slots_.pop_front();
  ring_.release();
  --writing_;
}

void ChunkPipeline::drain() noexcept {
  for (const Slot& slot : slots_) {
    // The caller learns of the first error; here only the end of the transfer matters.
    static_cast<void>(wait_for_all(slot.handles));
    ring_.release();
  }
  slots_.clear();
  writing_ = 0;
  is_processing_ = false;
  exhausted_ = true;
  pending_.reset();
}

}  // namespace zero_ext::core
