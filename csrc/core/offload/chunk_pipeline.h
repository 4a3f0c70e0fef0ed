// Jobs that read from a store, are worked on, and are written back: transfers of several jobs are
// in flight at once, in memory of fixed size.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "../store/byte_store.h"
#include "ring_buffer.h"

namespace zero_ext::core {

// One contiguous transfer between the store and a part of a job's memory; none if bytes is 0.
struct ChunkTransfer {
  std::int64_t offset = 0;         // in the store
  std::int64_t memory_offset = 0;  // in the job's memory
  std::int64_t bytes = 0;
  std::int64_t padding = 0;  // those of the bytes that hold nothing
};

struct ChunkJob {
  std::size_t range = 0;
  std::int64_t chunk = 0;
  std::int64_t bytes = 0;  // of memory
  std::array<ChunkTransfer, 2> reads{};
  std::array<ChunkTransfer, 2> writes{};
};

struct StoreExtent {
  std::int64_t offset;
  std::int64_t bytes;
};

// Throws std::runtime_error unless all begin at multiples of `alignment` and no two overlap.
void check_extents(std::vector<StoreExtent> extents, std::int64_t alignment);

struct PipelineCounters {
  std::int64_t bytes_read = 0;  // padding included
  std::int64_t bytes_written = 0;
  std::int64_t padding_read = 0;
  std::int64_t padding_written = 0;
  std::chrono::nanoseconds waiting_for_reads{0};
  std::chrono::nanoseconds waiting_for_writes{0};
  std::chrono::nanoseconds computing{0};  // by whoever calls next()
};

// Used from one thread. Reads are issued as far ahead as the ring has room; writes are waited for
// when their room is needed, all of them at the end.
class ChunkPipeline {
 public:
  struct Slot {
    ChunkJob job;
    std::span<std::byte> memory;
    std::array<std::shared_ptr<TransferHandle>, 2> handles;
  };

  // `source` gives the jobs in order, then nothing. No two may touch the same bytes of the store.
  // Waits until nobody else uses the ring.
  ChunkPipeline(ByteStore& store, RingBuffer& ring,
                std::function<std::optional<ChunkJob>()> source);

  // Waits for all transfers in flight. The job in hand is not written.
  ~ChunkPipeline();
  ChunkPipeline(const ChunkPipeline&) = delete;
  ChunkPipeline& operator=(const ChunkPipeline&) = delete;

  // The next job, its reads complete; its writes start with the following call. Null once there
  // are no more and everything has been written. Throws the first error of any transfer, with
  // none left in flight.
  Slot* next();

  const PipelineCounters& counters() const { return counters_; }

 private:
  using Clock = std::chrono::steady_clock;

  Slot* advance();
  void read_ahead();
  void start_reads(Slot& slot);
  void start_writes(Slot& slot);
  void release_written();
  void release_oldest();
  void drain() noexcept;

  ByteStore& store_;
  RingBuffer& ring_;
  std::unique_lock<std::mutex> exclusive_;
  std::function<std::optional<ChunkJob>()> source_;
  std::optional<ChunkJob> pending_;  // the source's latest, for which the ring has no room yet
  bool exhausted_ = false;
  std::deque<Slot> slots_;      // in the ring's order: being written, in hand, being read
  std::size_t writing_ = 0;     // how many at the front are being written
  bool is_processing_ = false;  // whether the caller works on slots_[writing_]
  Clock::time_point returned_at_;
  PipelineCounters counters_;
};

}  // namespace zero_ext::core
