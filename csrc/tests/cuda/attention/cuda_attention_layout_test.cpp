#include <algorithm>
#include <map>
#include <string>

#include "cuda_attention_support.h"

namespace zero_ext::testing {
namespace {

using core::testing::fresh_generator;
using cuda::BlockList;
using cuda::CheckLists;

// Whatever the lists are, whoever reads their unions stays within bounds.
void expect_within_bounds(const Unions& unions, const CheckLists& layout, int shift, int rows) {
  const auto total = static_cast<std::int32_t>(layout.total);
  for (std::size_t i = 0; i < unions.extents.size(); i += 2) {
    const std::int32_t begin = unions.extents[i];
    const std::int32_t count = unions.extents[i + 1];
    ASSERT_TRUE(0 <= begin && 0 <= count && begin + count <= total) << begin << " " << count;
    const BlockList list{unions.entries.data() + begin, count, shift};
    for (std::int32_t group = 0; group < list.tiles<16>(); ++group) {
      const std::int32_t position = list.position(group);
      EXPECT_TRUE(0 <= position && position >> shift < layout.limit) << position;
      EXPECT_EQ((position & cuda::kBandBits) >> (rows / 16), 0);
    }
    EXPECT_EQ(list.position(list.tiles<16>()), cuda::kAbsent);
  }
}

// The bands of a block of threads that have each block of 16 rows, straight from the lists.
std::map<std::int32_t, std::int32_t> bands_of(const Data<float>& data, const Lists& lists,
                                              std::int64_t count, std::int64_t head,
                                              std::int32_t first, int rows) {
  std::map<std::int32_t, std::int32_t> expected;
  const int shift = data.problem.shift;
  const std::int64_t heads = data.problem.shared_layout ? 0 : head;
  for (int band = 0; band < rows / 16; ++band) {
    const std::int64_t list = (first + 16 * band) >> shift;
    if (list >= count) break;
    const auto at = static_cast<std::size_t>(heads * (count + 1) + list);
    for (std::int32_t i = lists.pointers[at]; i < lists.pointers[at + 1]; ++i) {
      const std::int32_t block = lists.blocks[static_cast<std::size_t>(i)];
      for (int chunk = 0; chunk < 1 << shift; chunk += 16) {
        expected[(block << shift) + chunk] |= 1 << band;
      }
    }
  }
  return expected;
}

TEST(CudaAttentionLayout, UnionsHaveEveryBlockOfTheirListsOnceWithItsBands) {
  auto generator = fresh_generator();
  for (const int shift : {4, 5, 6, 7}) {
    for (const int rows : {16, 32, 64}) {
      const std::int32_t length = std::uniform_int_distribution<std::int32_t>(1, 1500)(generator);
      Problem problem{{1, 3, 1, length, 1100, 16}, shift};
      problem.shared_layout = generator() % 2 == 0;
      problem.density = 0.01 * std::uniform_int_distribution<int>(0, 60)(generator);
      SCOPED_TRACE(::testing::Message()
                   << "block " << (1 << shift) << ", rows " << rows << ", length " << length
                   << ", density " << problem.density);
      const Data<float> data = make_data<float>(problem, generator);
      const CheckLists layout = data.layout(data.by_rows);
      const Unions unions(layout, shift, rows, generator);
      expect_within_bounds(unions, layout, shift, rows);
      for (std::int64_t head = 0; head < 3; ++head) {
        for (std::int32_t first = 0; first < length; first += rows) {
          const BlockList list = unions.lists.of(head, first);
          std::map<std::int32_t, std::int32_t> found;
          std::int32_t last = -1;
          for (std::int32_t group = 0; group < list.tiles<16>(); ++group) {
            const std::int32_t position = list.position(group);
            EXPECT_GT(position, last);
            last = position;
            found[position & ~cuda::kBandBits] = position & cuda::kBandBits;
          }
          EXPECT_EQ(found, bands_of(data, data.by_rows, data.row_blocks, head, first, rows));
        }
      }
    }
  }
}

// The check refuses such lists. Their unions may overlap, so one warp at a time writes them.
TEST(CudaAttentionLayout, UnionsOfListsWithoutMeaningStayWithinBounds) {
  auto generator = fresh_generator();
  for (int i = 0; i < 60; ++i) {
    const int shift = 4 + i % 3;
    Problem problem{{1, 2, 1, 200, 300, 16}, shift};
    problem.shared_layout = false;
    Data<float> data = make_data<float>(problem, generator);
    const auto spoil = [&](std::vector<std::int32_t>& numbers) {
      for (std::int32_t& each : numbers) {
        const std::uint64_t chance = generator() % 6;
        if (chance == 0) each = static_cast<std::int32_t>(generator());
        if (chance == 1) each = static_cast<std::int32_t>(generator() % 20);
      }
    };
    if (i % 2 == 0) spoil(data.by_rows.pointers);
    if (i % 3 != 0) spoil(data.by_rows.blocks);
    const CheckLists layout = data.layout(data.by_rows);
    expect_within_bounds(Unions(layout, shift, 64, generator, 1), layout, shift, 64);
  }
}

TEST(CudaAttentionLayout, UnionsAreEmptyOnceAnErrorIsRecorded) {
  auto generator = fresh_generator();
  for (const int rows : {16, 64}) {
    Problem problem{{1, 2, 1, 200, 300, 16}, 5};
    problem.density = 0.7;
    Data<float> data = make_data<float>(problem, generator);
    const CheckLists layout = data.layout(data.by_rows);
    layout(0, 1);
    const Unions good(layout, 5, rows, generator);
    EXPECT_NE(std::count(good.extents.begin(), good.extents.end(), 0),
              static_cast<std::ptrdiff_t>(good.extents.size()));
    data.by_rows.blocks.back() = 1 << 20;
    layout(0, 1);
    EXPECT_TRUE(cuda::has_error(data.errors.get()));
    const Unions bad(layout, 5, rows, generator);
    EXPECT_EQ(bad.extents, std::vector<std::int32_t>(bad.extents.size(), 0));
  }
}

TEST(CudaAttentionLayout, ListsAreRecordedByTheDeviceWhereTheyAreWrong) {
  std::vector<std::int32_t> pointers = {0, 2, 3, 3, 3, 5};
  std::vector<std::int32_t> blocks = {0, 2, 1, 0, 1};
  const auto check = [&] {
    cuda::DeviceErrorRecord record{};
    CheckLists{cuda::DeviceOp::attention_backward,
               cuda::DeviceArgument::row_pointers,
               cuda::DeviceArgument::columns,
               &record,
               pointers.data(),
               blocks.data(),
               2,
               2,
               5,
               3}(0, 1);
    return core::device_error_text(record);
  };
  EXPECT_EQ(check(), "");
  const auto refuses = [&](std::vector<std::int32_t>& of, std::size_t at, std::int32_t value,
                           const std::string& name) {
    std::swap(of[at], value);
    const std::string offset = "an offset into the blocks, not below the one before";
    const std::string block = "a block of the layout, above the one before in its list";
    EXPECT_EQ(check(), "block_sparse_attention_backward: entry of " + name + ": expected " +
                           (&of == &pointers ? offset : block) + ", got " + std::to_string(of[at]) +
                           ".");
    std::swap(of[at], value);
  };
  refuses(pointers, 0, -1, "row_pointers[0]");
  refuses(pointers, 1, 6, "row_pointers[1]");
  refuses(pointers, 2, 1, "row_pointers[2]");
  refuses(pointers, 3, 2, "row_pointers[3]");
  refuses(pointers, 5, 6, "row_pointers[5]");
  refuses(blocks, 0, -1, "columns[0]");
  refuses(blocks, 1, 3, "columns[1]");
  refuses(blocks, 1, 0, "columns[1]");
}

}  // namespace
}  // namespace zero_ext::testing
