#include "../../core/offload/state_read_write.h"

#include <cstring>
#include <stdexcept>

#include "../../core/flat/flat_buffer.h"
#include "../../core/offload/adam_stream.h"
#include "../store/fake_store.h"
#include "../test_support.h"

namespace zero_ext::core {
namespace {

using testing::FakeStore;
using testing::fresh_generator;

using Bytes = std::vector<std::byte>;

std::int64_t pick(std::mt19937_64& generator, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(generator);
}

Bytes random_bytes(std::mt19937_64& generator, std::int64_t count) {
  Bytes result(static_cast<std::size_t>(count));
  for (std::byte& each : result) each = static_cast<std::byte>(generator());
  return result;
}

std::int64_t bytes_of(const StateField& field, std::int64_t elements) {
  return (elements + field.elements - 1) / field.elements * field.bytes;
}

// A whole range in memory, field by field: what the store must hold.
struct Model {
  ChunkLayout layout;
  std::int64_t offset;
  std::vector<Bytes> fields;

  explicit Model(std::mt19937_64& generator, std::int64_t alignment)
      : layout(pick(generator, 1, 5000), {{4, 1}, {pick(generator, 1, 4), 1}, {4, 16}},
               std::max<std::int64_t>(alignment / 2, 16) * pick(generator, 1, 6), alignment),
        offset(alignment * pick(generator, 0, 3)) {
    for (const StateField& field : layout.fields()) {
      fields.push_back(random_bytes(generator, bytes_of(field, layout.elements())));
    }
  }

  StateSlice slice(std::int64_t begin, std::int64_t end, std::vector<Bytes>& memory) {
    StateSlice result{layout, offset, begin, end, {}};
    for (Bytes& field : memory) result.fields.push_back(field.empty() ? nullptr : field.data());
    return result;
  }

  // Memory for the fields that are asked for, of exact size.
  std::vector<Bytes> memory(std::mt19937_64& generator, std::int64_t begin, std::int64_t end) {
    std::vector<Bytes> result(fields.size());
    for (std::size_t i = 0; i < fields.size(); ++i) {
      const bool requested_bytes = pick(generator, 0, 2) > 0;
      if (requested_bytes)
        result[i] = random_bytes(generator, bytes_of(layout.fields()[i], end - begin));
    }
    return result;
  }

  std::span<std::byte> window(std::size_t field, std::int64_t begin, std::size_t bytes) {
    const auto first = static_cast<std::size_t>(bytes_of(layout.fields()[field], begin));
    return std::span(fields[field]).subspan(first, bytes);
  }
};

TEST(StateAccess, RandomSlicesAgreeWithAModelInMemory) {
  auto generator = fresh_generator();
  for (int round = 0; round < 25; ++round) {
    const std::int64_t alignment = std::int64_t{1} << pick(generator, 0, 9);
    Model model(generator, alignment);
    const std::int64_t bytes = model.offset + model.layout.extent_bytes() + alignment;
    FakeStore store(bytes, generator(), {alignment});
    RingBuffer ring(2 * (model.layout.padded_bytes(0) + RingBuffer::kAlignment));
    write_state(store, ring, model.slice(0, model.layout.elements(), model.fields));
    for (int transfer_slice = 0; transfer_slice < 12; ++transfer_slice) {
      const std::int64_t begin = pick(generator, 0, model.layout.elements() / 16) * 16;
      const std::int64_t end =
          std::min(model.layout.elements(), begin + 16 * pick(generator, 0, 200));
      if (begin > end) continue;
      std::vector<Bytes> memory = model.memory(generator, begin, end);
      if (transfer_slice % 2 == 0) {
        write_state(store, ring, model.slice(begin, end, memory));
        for (std::size_t i = 0; i < memory.size(); ++i) {
          std::ranges::copy(memory[i], model.window(i, begin, memory[i].size()).begin());
        }
      } else {
        read_state(store, ring, model.slice(begin, end, memory));
        for (std::size_t i = 0; i < memory.size(); ++i) {
          ASSERT_TRUE(std::ranges::equal(memory[i], model.window(i, begin, memory[i].size())));
        }
      }
    }
    std::vector<Bytes> all = model.fields;
    for (Bytes& field : all) std::ranges::fill(field, std::byte{0xEE});
    read_state(store, ring, model.slice(0, model.layout.elements(), all));
    EXPECT_EQ(all, model.fields);
    const auto outside = [&](std::size_t i) { return store.data[i] == std::byte{0x5A}; };
    for (std::size_t i = 0; i < static_cast<std::size_t>(model.offset); ++i) {
      ASSERT_TRUE(outside(i));
    }
    for (auto i = static_cast<std::size_t>(bytes - alignment); i < store.data.size(); ++i) {
      ASSERT_TRUE(outside(i));
    }
    EXPECT_EQ(store.unwaited, 0);
  }
}

TEST(StateAccess, FullRangesAreWrittenWithoutReading) {
  auto generator = fresh_generator();
  Model model(generator, 64);
  FakeStore store(model.offset + model.layout.extent_bytes(), generator(), {64});
  RingBuffer ring(1 << 16);
  std::ranges::fill(*ring.acquire(1 << 16), std::byte{0xA5});
  ring.release();
  const PipelineCounters counters =
      write_state(store, ring, model.slice(0, model.layout.elements(), model.fields));
  EXPECT_EQ(counters.bytes_read, 0);
  EXPECT_EQ(counters.bytes_written, model.layout.extent_bytes());
  std::int64_t useful = 0;
  for (const Bytes& field : model.fields) useful += static_cast<std::int64_t>(field.size());
  EXPECT_EQ(counters.bytes_written - counters.padding_written, useful);
  for (std::int64_t chunk = 0; chunk < model.layout.chunks(); ++chunk) {
    const std::int64_t begin = model.layout.state_bytes(chunk);
    const std::span padding =
        std::span(store.data)
            .subspan(static_cast<std::size_t>(model.offset + model.layout.offset(chunk) + begin),
                     static_cast<std::size_t>(model.layout.padded_bytes(chunk) - begin));
    EXPECT_TRUE(std::ranges::all_of(padding, [](std::byte each) { return each == std::byte{0}; }))
        << "padding holds what passed through the ring before";
  }
}

TEST(StateAccess, ReadsOfOneFieldMoveThatFieldOnly) {
  auto generator = fresh_generator();
  const ChunkLayout layout(4 * 2048, adam_fields(AdamMoments::float32), 2048, 4096);
  FakeStore store(layout.extent_bytes(), generator(), {4096});
  RingBuffer ring(1 << 20);
  Bytes master(4 * 4 * 2048);
  const PipelineCounters counters =
      read_state(store, ring, {layout, 0, 0, 4 * 2048, {master.data(), nullptr, nullptr}});
  EXPECT_EQ(counters.bytes_read, 4 * 4 * 2048);
  EXPECT_EQ(counters.padding_read, 0);
}

TEST(StateAccess, FillConvertsTheMasterAndZeroesTheRest) {
  auto generator = fresh_generator();
  for (const NumericType type :
       {NumericType::float32, NumericType::bfloat16, NumericType::float16}) {
    const ChunkLayout layout(1001, adam_fields(AdamMoments::bfloat16), 256, 512);
    FakeStore store(layout.extent_bytes(), generator(), {512});
    RingBuffer ring(8192);
    std::ranges::fill(*ring.acquire(8192), std::byte{0xA5});
    ring.release();
    const std::vector<float> normal = testing::normal_values<float>(generator, 1001);
    Bytes source(static_cast<std::size_t>(1001 * element_size(type)));
    copy_cast(source.data(), type, normal.data(), NumericType::float32, 1001);
    fill_state(store, ring, layout, 0, source.data(), type);
    EXPECT_TRUE(std::ranges::all_of(store.writes_of, [](auto count) { return count == 1; }));
    std::vector<Bytes> fields{Bytes(4004), Bytes(2002, std::byte{1}), Bytes(2002, std::byte{1})};
    read_state(store, ring,
               {layout, 0, 0, 1001, {fields[0].data(), fields[1].data(), fields[2].data()}});
    Bytes master(4004);
    copy_cast(master.data(), NumericType::float32, source.data(), type, 1001);
    EXPECT_EQ(fields[0], master);
    EXPECT_EQ(fields[1], Bytes(2002));
    EXPECT_EQ(fields[2], Bytes(2002));
  }
}

TEST(StateAccess, BadSlicesAreRefused) {
  auto generator = fresh_generator();
  const ChunkLayout layout(1000, {{4, 1}, {4, 16}}, 256, 512);
  FakeStore store(layout.extent_bytes(), generator(), {512});
  RingBuffer ring(8192);
  Bytes memory(4000);
  std::byte* const data = memory.data();
  const auto refused = [&](const StateSlice& slice) {
    EXPECT_THROW(read_state(store, ring, slice), std::runtime_error);
    EXPECT_THROW(write_state(store, ring, slice), std::runtime_error);
  };
  refused({layout, 0, -1, 5, {data, nullptr}});
  refused({layout, 0, 6, 5, {data, nullptr}});
  refused({layout, 0, 0, 1001, {data, nullptr}});
  refused({layout, 0, 0, 1000, {data}});
  refused({layout, 5, 0, 1000, {data, nullptr}});
  refused({layout, 0, 8, 1000, {nullptr, data}});
  refused({layout, 0, 0, 40, {nullptr, data}});
  EXPECT_EQ(store.transfers, 0);
  EXPECT_NO_THROW(read_state(store, ring, {layout, 0, 16, 1000, {nullptr, data}}));
}

TEST(StateAccess, FailuresAreReportedWithNoneInFlight) {
  auto generator = fresh_generator();
  const ChunkLayout layout(1000, adam_fields(AdamMoments::float32), 64, 1);
  RingBuffer ring(8192);
  Bytes memory(4000);
  for (int n = 0; n < 16; ++n) {
    FakeStore store(layout.extent_bytes(), generator(), {1, {}, n});
    EXPECT_THROW(read_state(store, ring, {layout, 0, 0, 1000, {memory.data(), nullptr, nullptr}}),
                 std::runtime_error);
    EXPECT_EQ(store.unwaited, 0);
  }
  ASSERT_TRUE(ring.acquire(8192));
}

}  // namespace
}  // namespace zero_ext::core
