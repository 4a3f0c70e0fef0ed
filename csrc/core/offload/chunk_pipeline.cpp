#include "chunk_pipeline.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace zero_ext::core {
namespace {

// Waits for a slot's transfers, all of them, then throws the first error.
void wait_for(const ChunkPipeline::Slot& slot) {
  std::exception_ptr error;
  for (const std::shared_ptr<TransferHandle>& handle : slot.handles) {
    if (handle == nullptr) continue;
    try {
      handle->wait();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

bool done(const ChunkPipeline::Slot& slot) {
  for (const std::shared_ptr<TransferHandle>& handle : slot.handles) {
    if (handle != nullptr && !handle->done()) return false;
  }
  return true;
}

std::span<std::byte> slice_of(const ChunkPipeline::Slot& slot, const ChunkTransfer& transfer) {
  return slot.memory.subspan(static_cast<std::size_t>(transfer.memory_offset),
                             static_cast<std::size_t>(transfer.bytes));
}

}  // namespace

ChunkPipeline::ChunkPipeline(ByteStore& store, RingBuffer& ring,
                             std::function<std::optional<ChunkJob>()> source)
    : store_(store), ring_(ring), exclusive_(ring.exclusive()), source_(std::move(source)) {
  if (RingBuffer::kAlignment % store.alignment() != 0) {
    throw std::runtime_error("ring: expected an alignment of " + std::to_string(store.alignment()) +
                             " bytes for the store, got " + std::to_string(RingBuffer::kAlignment) +
                             ". Use a device with smaller sectors.");
  }
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
      throw std::runtime_error("ring: expected at least the " + std::to_string(pending_->bytes) +
                               " bytes of a chunk, got " + std::to_string(ring_.bytes()) +
                               ". Raise staging_buffer_bytes to the former.");
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
  while (writing_ > 0 && done(slots_.front())) release_oldest();
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
    try {
      wait_for(slot);
    } catch (...) {
      // The caller learns of the first error; here only the end of the transfer matters.
    }
    ring_.release();
  }
  slots_.clear();
  writing_ = 0;
  is_processing_ = false;
  exhausted_ = true;
  pending_.reset();
}

}  // namespace zero_ext::core
