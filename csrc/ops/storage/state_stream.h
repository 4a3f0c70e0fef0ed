// Open stores and state streams, and the counters that ops on streams add to.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "../../core/offload/chunk_layout.h"
#include "../../core/offload/chunk_pipeline.h"
#include "../checks.h"

namespace zero_ext::ops {

// The store that store_open made under `handle`; whoever holds it keeps it open. An error as of
// STD_TORCH_CHECK if there is none.
std::shared_ptr<core::ByteStore> store_of(std::int64_t handle);

// A store, the fields of the state that lies in it, and the ring that the state passes through.
struct StateStream {
  StateStream(std::shared_ptr<core::ByteStore> in_store, std::int64_t staging_buffer_bytes,
              std::vector<core::StateField> state_fields)
      : store(std::move(in_store)),
        fields(std::move(state_fields)),
        chunk_elements(core::chunk_elements_for(staging_buffer_bytes, fields)),
        ring(staging_buffer_bytes) {}

  // Of a range of so many elements.
  core::ChunkLayout layout(std::int64_t elements) const {
    return {elements, fields, chunk_elements, store->alignment()};
  }

  std::shared_ptr<core::ByteStore> store;
  std::vector<core::StateField> fields;
  std::int64_t chunk_elements;
  core::RingBuffer ring;
};

// The stream with this handle; refuses one that is not open.
std::shared_ptr<StateStream> stream_of(std::int64_t handle);

// int64 [7]: bytes read, bytes written, padding among each, nanoseconds waiting for reads, waiting
// for writes, computing.
void check_counters(const Tensor& counters, const char* op);
void add_counters(const Tensor& counters, const core::PipelineCounters& passed);

}  // namespace zero_ext::ops
