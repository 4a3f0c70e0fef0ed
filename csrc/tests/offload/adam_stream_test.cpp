#include "../../core/offload/adam_stream.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

#include "../../core/base/rounding.h"
#include "../../core/flat/flat_buffer.h"
#include "../../core/optimizers/adam_8bit.h"
#include "../../core/optimizers/optimizer_step.h"
#include "../store/fake_store.h"
#include "../test_support.h"

namespace zero_ext::core {
namespace {

using testing::FakeStore;
using testing::fresh_generator;
using testing::normal_values;

constexpr NumericType kTypes[] = {NumericType::float32, NumericType::bfloat16,
                                  NumericType::float16};

std::int64_t pick(std::mt19937_64& generator, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(generator);
}

using Bytes = std::vector<std::byte>;

Bytes random_values(std::mt19937_64& generator, std::int64_t count, NumericType type,
                    bool positive = false) {
  std::vector<float> values = normal_values<float>(generator, static_cast<std::size_t>(count));
  if (positive) {
    for (float& value : values) value = std::abs(value);
  }
  Bytes result(static_cast<std::size_t>(count * element_size(type)));
  copy_cast(result.data(), type, values.data(), NumericType::float32, count);
  return result;
}

// Master weights and moments of so many elements, field by field.
std::vector<Bytes> random_state(std::mt19937_64& generator, std::int64_t elements,
                                AdamMoments moments) {
  std::vector<Bytes> fields{random_values(generator, elements, NumericType::float32)};
  if (moments == AdamMoments::blockwise8) {
    for (int i = 0; i < 2; ++i) {
      fields.push_back(random_values(generator, block_count(elements), NumericType::float32, true));
    }
    for (int i = 0; i < 2; ++i) {
      Bytes& codes = fields.emplace_back(static_cast<std::size_t>(elements));
      for (std::byte& code : codes) code = static_cast<std::byte>(generator());
    }
    return fields;
  }
  const bool wide = moments == AdamMoments::float32;
  const NumericType type = wide ? NumericType::float32 : NumericType::bfloat16;
  fields.push_back(random_values(generator, elements, type));
  fields.push_back(random_values(generator, elements, type, true));
  return fields;
}

// One range: its state, gradient and parameters in memory as adam_step has them, and where they
// lie in the store.
AdamRule::Coefficients coefficients_of(const std::array<double, AdamRule::kHyper>& row,
                                       float scale) {
  return AdamRule::coefficients(row.data(), scale);
}

struct Range {
  ChunkLayout layout;
  AdamMoments moments;
  NumericType grad_type;
  std::optional<NumericType> param_type;
  std::vector<Bytes> fields;
  Bytes grad, param;
  std::vector<AdamSegment> segments;
  bool grad_stored = false;
  bool param_stored = false;
  std::int64_t offset = 0, grad_offset = 0, param_offset = 0;
  std::int64_t target = -1;  // of the state after the step; negative: at offset

  std::int64_t padded(NumericType type) const {
    return round_up(layout.elements() * element_size(type), layout.alignment());
  }

  template <class T>
  T* field(std::size_t index) {
    return reinterpret_cast<T*>(fields[index].data());
  }

  void step_in_memory() {
    void* const output = param_type ? param.data() : nullptr;
    if (moments == AdamMoments::blockwise8) {
      adam_step_8bit(
          {layout.elements(), field<float>(0), field<std::uint8_t>(3), field<std::uint8_t>(4),
           field<float>(1), field<float>(2), grad.data(), grad_type, output, param_type},
          segments, 0, block_count(layout.elements()));
      return;
    }
    const bool wide = moments == AdamMoments::float32;
    std::int64_t total = 0;
    for (const AdamSegment& segment : segments) total += segment.end - segment.begin;
    optimizer_step<AdamRule>({field<float>(0),
                              {fields[1].data(), fields[2].data()},
                              wide ? NumericType::float32 : NumericType::bfloat16,
                              grad.data(),
                              grad_type,
                              output,
                              param_type},
                             segments, 0, total);
  }

  AdamRange request() {
    AdamRange result{
        layout,
        offset,
        {grad_type, grad_stored ? nullptr : grad.data(), grad_stored ? grad_offset : -1},
        std::nullopt,
        segments,
        target};
    if (param_type) {
      result.param = {*param_type, param_stored ? nullptr : param.data(),
                      param_stored ? param_offset : -1};
    }
    return result;
  }

  // Copies between the state in memory and its chunks in the store.
  template <class Move>
  void each_field(FakeStore& store, std::int64_t extent, const Move& move) {
    for (std::int64_t chunk = 0; chunk < layout.chunks(); ++chunk) {
      std::byte* stored = store.data.data() + extent + layout.offset(chunk);
      for (std::size_t i = 0; i < fields.size(); ++i) {
        const auto [bytes, elements] = layout.fields()[i];
        const std::int64_t length = (layout.count(chunk) + elements - 1) / elements * bytes;
        move(fields[i].data() + layout.begin(chunk) / elements * bytes, stored, length);
        stored += length;
      }
    }
  }

  void save(FakeStore& store) {
    each_field(store, offset, [](std::byte* memory, std::byte* stored, std::int64_t length) {
      std::memcpy(stored, memory, static_cast<std::size_t>(length));
    });
    if (grad_stored) std::ranges::copy(grad, store.data.begin() + grad_offset);
    if (param_stored) std::ranges::copy(param, store.data.begin() + param_offset);
  }

  void expect_stored(FakeStore& store) {
    each_field(store, target < 0 ? offset : target,
               [](const std::byte* memory, const std::byte* stored, std::int64_t length) {
                 EXPECT_EQ(std::memcmp(stored, memory, static_cast<std::size_t>(length)), 0);
               });
    if (param_stored) {
      EXPECT_TRUE(std::ranges::equal(
          param,
          std::span(store.data).subspan(static_cast<std::size_t>(param_offset), param.size())));
    }
  }
};

std::vector<AdamSegment> random_segments(std::mt19937_64& generator, std::int64_t elements) {
  std::vector<AdamSegment> segments;
  std::int64_t begin = pick(generator, 0, 3) == 0 ? 0 : pick(generator, 0, elements / 2);
  while (begin <= elements && segments.size() < 6) {
    const std::int64_t end =
        pick(generator, 0, 3) == 0 ? elements : pick(generator, begin, elements);
    const double beta1 = pick(generator, 0, 1) == 0 ? 0.9 : 0.3;
    const auto step = static_cast<double>(pick(generator, 1, 9));
    segments.push_back(
        {begin, end, coefficients_of({1e-2, beta1, 0.99, 1e-8, 0.1, step, 1, 0}, 0.5F)});
    begin = end + (pick(generator, 0, 1) == 0 ? 0 : pick(generator, 0, elements / 3 + 1));
  }
  return segments;
}

struct Problem {
  std::vector<Range> ranges;
  AdamMoments moments = AdamMoments::float32;
  std::int64_t alignment = 1;
  std::int64_t largest_chunk = 0;  // bytes of ring
  std::int64_t store_bytes = 0;

  std::vector<AdamRange> requests() {
    std::vector<AdamRange> result;
    for (Range& range : ranges) result.push_back(range.request());
    return result;
  }
};

// Extents lie in random order with gaps in between.
void lay_out_extents(std::mt19937_64& generator, Problem& problem) {
  std::vector<std::pair<std::int64_t*, std::int64_t>> extents;
  for (Range& range : problem.ranges) {
    extents.emplace_back(&range.offset, range.layout.extent_bytes());
    if (range.target >= 0) extents.emplace_back(&range.target, range.layout.extent_bytes());
    if (range.grad_stored) extents.emplace_back(&range.grad_offset, range.padded(range.grad_type));
    if (range.param_stored) {
      extents.emplace_back(&range.param_offset, range.padded(*range.param_type));
    }
  }
  std::ranges::shuffle(extents, generator);
  for (auto [offset, bytes] : extents) {
    problem.store_bytes += problem.alignment * pick(generator, 0, 2);
    *offset = problem.store_bytes;
    problem.store_bytes += bytes;
  }
  problem.store_bytes += problem.alignment;
}

Problem random_problem(std::mt19937_64& generator, int ranges, std::int64_t alignment) {
  Problem problem;
  problem.alignment = alignment;
  problem.moments = static_cast<AdamMoments>(pick(generator, 0, 2));
  const bool blocks = problem.moments == AdamMoments::blockwise8;
  const std::int64_t unit = std::max<std::int64_t>(alignment / 2, blocks ? kQuantizationBlock : 1);
  const std::int64_t chunk = unit * pick(generator, 1, blocks ? 4 : 300);
  for (int i = 0; i < ranges; ++i) {
    const std::int64_t elements =
        i == 0 ? 4 * chunk + 1 : pick(generator, i == 1 ? 0 : 1, 5 * chunk);
    Range range{ChunkLayout(elements, adam_fields(problem.moments), chunk, alignment),
                problem.moments,
                kTypes[pick(generator, 0, 2)],
                std::nullopt,
                random_state(generator, elements, problem.moments),
                {},
                {},
                random_segments(generator, elements)};
    range.grad = random_values(generator, elements, range.grad_type);
    range.grad_stored = pick(generator, 0, 1) == 0;
    range.target = pick(generator, 0, 1) - 1;  // none, or a place to be chosen
    if (const std::int64_t type = pick(generator, 0, 3); type < 3) {
      range.param_type = kTypes[type];
      range.param_stored = pick(generator, 0, 1) == 0;
      range.param.resize(static_cast<std::size_t>(elements * element_size(kTypes[type])));
      copy_cast(range.param.data(), kTypes[type], range.fields[0].data(), NumericType::float32,
                elements);
    }
    problem.ranges.push_back(std::move(range));
  }
  problem.largest_chunk = 3 * RingBuffer::kAlignment + 20 * chunk;
  lay_out_extents(generator, problem);
  return problem;
}

// Uneven parts on three threads.
void on_threads(std::int64_t count, std::int64_t /*grain*/, const PipelineCounters& /*so_far*/,
                const RangeFunction& function) {
  testing::split_over_threads(count, 3, function);
}

void in_one_go(std::int64_t count, std::int64_t /*grain*/, const PipelineCounters& /*so_far*/,
               const RangeFunction& function) {
  function(0, count);
}

std::int64_t total_of(const std::vector<std::uint8_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

TEST(AdamStream, EqualsTheStepInMemoryBitForBit) {
  auto generator = fresh_generator();
  for (int round = 0; round < 60; ++round) {
    const std::int64_t alignment = std::int64_t{1} << pick(generator, 0, 9);
    Problem problem = random_problem(generator, static_cast<int>(pick(generator, 1, 5)), alignment);
    FakeStore store(problem.store_bytes, generator(), {alignment});
    for (Range& range : problem.ranges) range.save(store);
    std::vector<Range> expected = problem.ranges;
    for (Range& range : expected) range.step_in_memory();
    const Bytes before = store.data;
    RingBuffer ring(problem.largest_chunk * pick(generator, 1, 6));
    const PipelineCounters counters =
        adam_stream(store, ring, problem.requests(), problem.moments, on_threads);
    EXPECT_EQ(store.unwaited, 0);
    EXPECT_EQ(counters.bytes_read, total_of(store.reads_of));
    EXPECT_EQ(counters.bytes_written, total_of(store.writes_of));
    EXPECT_LE(*std::ranges::max_element(store.reads_of), 1);
    EXPECT_LE(*std::ranges::max_element(store.writes_of), 1);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      expected[i].expect_stored(store);
      if (expected[i].param_stored) continue;
      EXPECT_EQ(problem.ranges[i].param, expected[i].param);
    }
    for (std::size_t i = 0; i < before.size(); ++i) {
      ASSERT_TRUE(store.writes_of[i] == 1 || store.data[i] == before[i]) << "byte " << i;
    }
  }
}

// Adam with one segment over each range, of which everything moves exactly once.
TEST(AdamStream, MovesStateOnceAndListsPadding) {
  auto generator = fresh_generator();
  const AdamMoments moments = AdamMoments::bfloat16;
  const ChunkLayout layout(5 * 512 + 7, adam_fields(moments), 512, 512);
  const std::vector<AdamSegment> all{{0, layout.elements(), coefficients_of({}, 1.0F)}};
  FakeStore store(layout.extent_bytes(), generator(), {512});
  std::ranges::fill(store.data, std::byte{0});
  RingBuffer ring(3 * 4096);
  const Bytes grad(static_cast<std::size_t>(2 * layout.elements()));
  const AdamRange range{layout, 0, {NumericType::bfloat16, grad.data(), -1}, std::nullopt, all};
  const PipelineCounters counters = adam_stream(store, ring, {&range, 1}, moments, in_one_go);
  EXPECT_EQ(counters.padding_read, 512 - 7 * 8);
  EXPECT_EQ(counters.padding_written, 512 - 7 * 8);
  EXPECT_EQ(counters.bytes_read - counters.padding_read, 8 * layout.elements());
  EXPECT_EQ(counters.bytes_written - counters.padding_written, 8 * layout.elements());
  EXPECT_GT(counters.computing.count(), 0);
}

TEST(AdamStream, RaisesTheFlagOfTheStepInMemory) {
  auto generator = fresh_generator();
  for (const AdamMoments moments :
       {AdamMoments::float32, AdamMoments::bfloat16, AdamMoments::blockwise8}) {
    const ChunkLayout layout(5 * 512 + 7, adam_fields(moments), 512, 512);
    const std::vector<AdamSegment> all{
        {0, layout.elements(), coefficients_of({1e-2, 0.9, 0.99, 1e-8, 0, 1, 1, 0}, 1.0F)}};
    for (const bool poisoned : {false, true}) {
      FakeStore store(layout.extent_bytes(), generator(), {512});
      std::ranges::fill(store.data, std::byte{0});
      RingBuffer ring(4 * 8192);
      Bytes grad = random_values(generator, layout.elements(), NumericType::float32);
      const std::int64_t memory_offset = pick(generator, 0, layout.elements() - 1);
      const float infinity = std::numeric_limits<float>::infinity();
      if (poisoned) std::memcpy(grad.data() + 4 * memory_offset, &infinity, sizeof(infinity));
      const AdamRange range{layout, 0, {NumericType::float32, grad.data(), -1}, std::nullopt, all};
      std::int32_t flag = 0;
      adam_stream(store, ring, {&range, 1}, moments, on_threads, &flag);
      EXPECT_EQ(flag, poisoned ? 1 : 0) << "element " << memory_offset;
    }
  }
}

TEST(AdamStream, SkipsChunksThatNoSegmentTouches) {
  auto generator = fresh_generator();
  const AdamMoments moments = AdamMoments::float32;
  const ChunkLayout layout(1000, adam_fields(moments), 100, 1);
  const AdamRule::Coefficients coefficients =
      coefficients_of({1e-2, 0.9, 0.99, 1e-8, 0, 1, 1, 0}, 1.0F);
  const std::vector<AdamSegment> segments{{0, 0, coefficients},
                                          {150, 150, coefficients},
                                          {299, 301, coefficients},
                                          {900, 1000, coefficients}};
  FakeStore store(layout.extent_bytes(), generator(), {});
  RingBuffer ring(1 << 16);
  const Bytes grad(4000);
  const AdamRange range{layout, 0, {NumericType::float32, grad.data(), -1}, std::nullopt, segments};
  adam_stream(store, ring, {&range, 1}, moments, in_one_go);
  for (std::int64_t chunk = 0; chunk < 10; ++chunk) {
    const bool touched = chunk == 2 || chunk == 3 || chunk == 9;
    const auto byte = static_cast<std::size_t>(layout.offset(chunk));
    EXPECT_EQ(store.reads_of[byte], touched ? 1 : 0) << chunk;
    EXPECT_EQ(store.writes_of[byte], touched ? 1 : 0) << chunk;
  }
}

TEST(AdamStream, TransfersOfSeveralChunksOverlapWithTheStep) {
  auto generator = fresh_generator();
  const AdamMoments moments = AdamMoments::float32;
  const ChunkLayout layout(40 * 300, adam_fields(moments), 300, 1);
  const std::vector<AdamSegment> all{{0, layout.elements(), coefficients_of({}, 1.0F)}};
  const Bytes grad(static_cast<std::size_t>(4 * layout.elements()));
  const AdamRange range{layout, 0, {NumericType::float32, grad.data(), -1}, std::nullopt, all};
  FakeStore store(layout.extent_bytes(), generator(), {1, std::chrono::microseconds(1000)});
  RingBuffer ring(6 * RingBuffer::kAlignment);  // six chunks of 3600 bytes, of forty
  int most_while_computing = 0;
  const auto segments = [&](std::int64_t count, std::int64_t grain, const PipelineCounters& so_far,
                            const RangeFunction& function) {
    most_while_computing = std::max(most_while_computing, store.outstanding());
    EXPECT_EQ(live_host_bytes(), ring.bytes());
    EXPECT_GT(so_far.waiting_for_reads.count(), 0);
    in_one_go(count, grain, so_far, function);
  };
  adam_stream(store, ring, {&range, 1}, moments, segments);
  EXPECT_GT(store.most_outstanding, 3);
  EXPECT_LE(store.most_outstanding, 6);
  EXPECT_GT(most_while_computing, 2);
  EXPECT_TRUE(store.read_beside_write);
}

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

TEST(AdamStream, ReportsTheFailureOfAnyTransferWithNoneInFlight) {
  auto generator = fresh_generator();
  Problem problem = random_problem(generator, 3, 64);
  RingBuffer ring(2 * problem.largest_chunk);
  int transfers = 1;
  for (int n = 0; n < transfers; ++n) {
    for (const bool refuse : {false, true}) {
      FakeStore store(problem.store_bytes, generator(), {64, {}, n, refuse});
      for (Range& range : problem.ranges) range.save(store);
      const std::string message = message_of(
          [&] { adam_stream(store, ring, problem.requests(), problem.moments, in_one_go); });
      EXPECT_EQ(message, "injected failure of transfer " + std::to_string(n));
      EXPECT_EQ(store.unwaited, 0);
      EXPECT_EQ(store.outstanding(), 0);
    }
    if (n == 0) {
      FakeStore store(problem.store_bytes, generator(), {64});
      for (Range& range : problem.ranges) range.save(store);
      adam_stream(store, ring, problem.requests(), problem.moments, in_one_go);
      transfers = store.transfers;
    }
  }
  EXPECT_GT(transfers, 10);
  ASSERT_TRUE(ring.acquire(ring.bytes())) << "a failed step has left spans in the ring";
}

TEST(AdamStream, AFailedComputationLeavesNothingInFlight) {
  auto generator = fresh_generator();
  Problem problem = random_problem(generator, 2, 1);
  problem.ranges[0].segments = {
      {0, problem.ranges[0].layout.elements(), coefficients_of({}, 1.0F)}};
  FakeStore store(problem.store_bytes, generator(), {1, std::chrono::microseconds(100)});
  RingBuffer ring(4 * problem.largest_chunk);
  int calls = 0;
  const auto segments = [&](std::int64_t, std::int64_t, const PipelineCounters&,
                            const RangeFunction&) {
    if (++calls == 3) throw std::runtime_error("no more threads");
  };
  EXPECT_EQ(
      message_of([&] { adam_stream(store, ring, problem.requests(), problem.moments, segments); }),
      "no more threads");
  EXPECT_EQ(store.unwaited, 0);
  ASSERT_TRUE(ring.acquire(ring.bytes()));
}

TEST(AdamStream, RefusesBeforeAnythingMoves) {
  auto generator = fresh_generator();
  Problem problem = random_problem(generator, 2, 512);
  FakeStore store(problem.store_bytes, generator(), {512});
  std::vector<AdamRange> requests = problem.requests();
  const auto message = [&](std::int64_t staging_buffer_bytes) {
    RingBuffer ring(staging_buffer_bytes);
    return message_of([&] { adam_stream(store, ring, requests, problem.moments, in_one_go); });
  };
  requests[0].offset += 1;
  EXPECT_NE(message(1 << 20).find("multiple of 512"), std::string::npos);
  requests[0].offset = -512;
  EXPECT_NE(message(1 << 20).find("got [-512, "), std::string::npos);
  requests = problem.requests();
  requests.push_back(requests[0]);
  EXPECT_NE(message(1 << 20).find("overlap"), std::string::npos);
  requests = {requests[0]};
  requests[0].target = requests[0].offset;
  EXPECT_NE(message(1 << 20).find("overlap"), std::string::npos);
  requests[0].target = -1;
  requests[0].segments = {};
  EXPECT_EQ(message(RingBuffer::kAlignment), "");
  const ChunkLayout large(10240, adam_fields(problem.moments), 10240, 512);
  const std::vector<AdamSegment> all{{0, 1, coefficients_of({}, 1.0F)}};
  requests[0] = {large, 0, {NumericType::float32, store.data.data(), -1}, std::nullopt, all};
  EXPECT_NE(message(RingBuffer::kAlignment).find("Raise staging_buffer_bytes"), std::string::npos);
  EXPECT_EQ(store.transfers, 0);
}

}  // namespace
}  // namespace zero_ext::core
