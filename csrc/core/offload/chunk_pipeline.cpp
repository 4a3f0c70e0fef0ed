#include "chunk_pipeline.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace zero_ext::core {
namespace {

// Waits for a slot's transfers, all of them, then throws the first error.
void wait_for(const ChunkPipeline::Slot& slot) {
  std::exception_ptr error;
  for (const std::shared_ptr<Ticket>& ticket : slot.tickets) {
    if (ticket == nullptr) continue;
    try {
      ticket->wait();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

bool done(const ChunkPipeline::Slot& slot) {
  for (const std::shared_ptr<Ticket>& ticket : slot.tickets) {
    if (ticket != nullptr && !ticket->done()) return false;
  }
  return true;
}

std::span<std::byte> part(const ChunkPipeline::Slot& slot, const Transfer& transfer) {
  return slot.memory.subspan(static_cast<std::size_t>(transfer.place),
                             static_cast<std::size_t>(transfer.bytes));
}

}  // namespace

ChunkPipeline::ChunkPipeline(ByteStore& store, Ring& ring,
                             std::function<std::optional<Job>()> source)
    : store_(store), ring_(ring), exclusive_(ring.exclusive()), source_(std::move(source)) {
  if (Ring::kAlignment % store.alignment() != 0) {
    throw std::runtime_error("ring: the store wants memory at multiples of " +
                             std::to_string(store.alignment()) + " bytes; the ring has " +
                             std::to_string(Ring::kAlignment));
  }
}

ChunkPipeline::~ChunkPipeline() { settle(); }

ChunkPipeline::Slot* ChunkPipeline::next() {
  if (in_hand_) counters_.computing += Clock::now() - handed_out_;
  try {
    Slot* const slot = advance();
    handed_out_ = Clock::now();
    return slot;
  } catch (...) {
    settle();
    throw;
  }
}

ChunkPipeline::Slot* ChunkPipeline::advance() {
  if (in_hand_) {
    in_hand_ = false;
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
  slot.tickets = {};
  in_hand_ = true;
  return &slot;
}

void ChunkPipeline::read_ahead() {
  while (!exhausted_) {
    if (!pending_) pending_ = source_();
    if (!pending_) {
      exhausted_ = true;
      return;
    }
    const std::optional<std::span<std::byte>> memory = ring_.take(pending_->bytes);
    if (!memory) {
      if (!slots_.empty()) return;
      throw std::runtime_error("ring: a chunk needs " + std::to_string(pending_->bytes) +
                               " bytes and the ring has " + std::to_string(ring_.bytes()) +
                               "; raise ring_bytes to at least the former");
    }
    Slot& slot = slots_.emplace_back(Slot{*pending_, *memory, {}});
    pending_.reset();
    start_reads(slot);
  }
}

void ChunkPipeline::start_reads(Slot& slot) {
  for (std::size_t i = 0; i < slot.job.reads.size(); ++i) {
    const Transfer& transfer = slot.job.reads[i];
    if (transfer.bytes == 0) continue;
    slot.tickets[i] = store_.read(transfer.offset, part(slot, transfer));
    counters_.bytes_read += transfer.bytes;
    counters_.padding_read += transfer.padding;
  }
}

void ChunkPipeline::start_writes(Slot& slot) {
  for (std::size_t i = 0; i < slot.job.writes.size(); ++i) {
    const Transfer& transfer = slot.job.writes[i];
    if (transfer.bytes == 0) continue;
    slot.tickets[i] = store_.write(transfer.offset, part(slot, transfer));
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

void ChunkPipeline::settle() noexcept {
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
  in_hand_ = false;
  exhausted_ = true;
  pending_.reset();
}

}  // namespace zero_ext::core
