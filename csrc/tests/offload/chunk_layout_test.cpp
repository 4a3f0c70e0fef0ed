#include "../../core/offload/chunk_layout.h"

#include <stdexcept>
#include <string>

#include "../../core/offload/adam_stream.h"
#include "../test_support.h"

namespace zero_ext::core {
namespace {

using testing::fresh_generator;

std::int64_t pick(std::mt19937_64& generator, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(generator);
}

TEST(ChunkLayout, ChunksTileTheExtentAndTheRange) {
  auto generator = fresh_generator();
  for (int round = 0; round < 300; ++round) {
    const std::int64_t alignment = std::int64_t{1} << pick(generator, 0, 12);
    const std::int64_t unit = std::max<std::int64_t>(alignment / 2, 8);
    const std::int64_t chunk_elements = unit * pick(generator, 1, 5);
    const std::vector<StateField> fields{{4, 1}, {pick(generator, 1, 4), 1}, {4, 8}};
    const ChunkLayout layout(pick(generator, 0, 5 * chunk_elements), fields, chunk_elements,
                             alignment);
    std::int64_t elements = 0;
    std::int64_t bytes = 0;
    for (std::int64_t chunk = 0; chunk < layout.chunks(); ++chunk) {
      ASSERT_EQ(layout.begin(chunk), elements);
      ASSERT_EQ(layout.offset(chunk), bytes);
      ASSERT_EQ(layout.offset(chunk) % alignment, 0);
      const std::int64_t count = layout.count(chunk);
      ASSERT_GE(count, 1);
      ASSERT_EQ(layout.field_offset(chunk, 1), 4 * count);
      ASSERT_EQ(layout.field_offset(chunk, 2), (4 + fields[1].bytes) * count);
      ASSERT_EQ(layout.state_bytes(chunk), (4 + fields[1].bytes) * count + (count + 7) / 8 * 4);
      ASSERT_GE(layout.padded_bytes(chunk), layout.state_bytes(chunk));
      ASSERT_LT(layout.padded_bytes(chunk) - layout.state_bytes(chunk), alignment);
      elements += count;
      bytes += layout.padded_bytes(chunk);
    }
    ASSERT_EQ(elements, layout.elements());
    ASSERT_EQ(bytes, layout.extent_bytes());
  }
}

TEST(ChunkLayout, FullChunksOfAdamNeedNoPadding) {
  const std::int64_t ring = 64 << 20;
  for (const auto& [moments, bytes] :
       {std::pair{AdamMoments::float32, 12}, std::pair{AdamMoments::bfloat16, 8}}) {
    const std::int64_t chunk = chunk_elements_for(ring, adam_fields(moments));
    const ChunkLayout layout(3 * chunk, adam_fields(moments), chunk, 4096);
    EXPECT_EQ(layout.extent_bytes(), 3 * chunk * bytes);
    EXPECT_LE(8 * chunk * (bytes + 8), ring);
    EXPECT_GT(8 * chunk * (bytes + 8), ring / 10 * 9);
  }
}

TEST(ChunkLayout, SmallestRingIsNamedAndWorks) {
  const std::vector<StateField> fields = adam_fields(AdamMoments::float32);
  std::string message;
  try {
    chunk_elements_for(1000, fields);
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  ASSERT_NE(message.find("1000"), std::string::npos);
  ASSERT_NE(message.find("327680"), std::string::npos) << message;
  EXPECT_EQ(chunk_elements_for(327680, fields), 2048);
  EXPECT_THROW(chunk_elements_for(327679, fields), std::runtime_error);
}

TEST(ChunkLayout, BadShapesAreRefused) {
  const std::vector<StateField> fields = adam_fields(AdamMoments::bfloat16);
  EXPECT_NO_THROW(ChunkLayout(10, fields, 2048, 4096));
  EXPECT_THROW(ChunkLayout(10, fields, 2047, 4096), std::runtime_error);
  EXPECT_THROW(ChunkLayout(10, fields, 0, 1), std::runtime_error);
  EXPECT_THROW(ChunkLayout(-1, fields, 2048, 4096), std::runtime_error);
  EXPECT_THROW(ChunkLayout(10, {}, 2048, 4096), std::runtime_error);
  EXPECT_THROW(ChunkLayout(10, {{4, 0}}, 2048, 4096), std::runtime_error);
  EXPECT_THROW(ChunkLayout(10, {{4, 3}}, 2048, 4096), std::runtime_error);
}

}  // namespace
}  // namespace zero_ext::core
