// One Adam step over optimizer state that lies in a store, through a ring of fixed size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "../optimizers/adam_8bit.h"
#include "../optimizers/adam_rule.h"
#include "adaptive_threading.h"
#include "chunk_layout.h"
#include "chunk_pipeline.h"

namespace zero_ext::core {

// blockwise8: dynamic codes of one byte, and a float32 scale for each block of them.
enum class AdamMoments : std::uint8_t { float32, bfloat16, blockwise8 };

// float32, bfloat16: master, exp_avg, exp_avg_sq. blockwise8: master, scales of exp_avg and of
// exp_avg_sq, codes of exp_avg and of exp_avg_sq; so every field begins at a multiple of its size.
std::vector<StateField> adam_fields(AdamMoments moments);

// The elements of a range as one type: in the store at `offset`, in an extent of whole aligned
// blocks, or (if offset is negative) in memory.
template <class Byte>
struct RangeElements {
  NumericType type;
  Byte* data;
  std::int64_t offset;
};

// What one step does to one range.
struct AdamRange {
  ChunkLayout layout;   // of adam_fields(moments)
  std::int64_t offset;  // of the state's extent
  RangeElements<const std::byte> gradient;
  std::optional<RangeElements<std::byte>> param;
  // Sorted, disjoint, inside the range. Other elements keep their state, and their parameters in
  // memory; chunks without any element of a segment are not transferred, unless `target` wants
  // all. Parameters in the store are rounded from the master weights for all elements of a chunk.
  std::span<const AdamSegment> segments;
  // Another extent that the state after the step goes to, all of it: the one at `offset` stays as
  // it is. Negative: it goes back to `offset`.
  std::int64_t target = -1;
};

// Runs function over [0, count), given the counters so far; parts of `grain` are worth a thread.
using ChunkRunner =
    std::function<void(std::int64_t count, std::int64_t grain, const PipelineCounters& so_far,
                       const RangeFunction& function)>;

// Equals adam_step (adam_step_8bit) on each whole range, bit for bit. Computes on the calling
// thread and those of `parts` while reads and writes of other chunks are in flight. Throws
// std::runtime_error before anything changes when extents overlap or are not aligned. When a
// transfer fails its error is thrown, with none left in flight; some chunks then hold the state
// after the step. `non_finite` is that of StepBuffers.
PipelineCounters adam_stream(ByteStore& store, RingBuffer& ring, std::span<const AdamRange> ranges,
                             AdamMoments moments, const ChunkRunner& runner,
                             std::int32_t* non_finite = nullptr);

}  // namespace zero_ext::core
