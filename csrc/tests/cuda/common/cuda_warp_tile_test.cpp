#include <cstring>
#include <vector>

#include "../../../cuda/common/warp_tile.h"
#include "../../test_support.h"

namespace zero_ext::cuda {
namespace {

using core::testing::fresh_generator;

template <class T>
std::vector<T> random_bits(std::size_t count, std::mt19937_64& generator) {
  std::vector<T> values(count);
  std::vector<std::uint8_t> bytes(count * sizeof(T));
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(generator());
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

template <class T>
bool same_bits(const T& one, const T& two) {
  return std::memcmp(&one, &two, sizeof(T)) == 0;
}

template <class Tile, class T>
void expect_each_lane_to_hold_its_positions(std::mt19937_64& generator) {
  const auto source = random_bits<T>(Tile::kElements, generator);
  typename Tile::template Fragment<T> fragment;
  Tile::load(source.data(), fragment);
  std::vector<int> seen(Tile::kElements);
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    for (int k = 0; k < Tile::kPerLane; ++k) {
      const int at = Tile::position(lane, k);
      ++seen[static_cast<std::size_t>(at)];
      EXPECT_TRUE(same_bits(fragment.at[lane][k], source[static_cast<std::size_t>(at)]))
          << "lane " << lane << " element " << k;
    }
  }
  EXPECT_EQ(seen, std::vector<int>(Tile::kElements, 1));
  std::vector<T> target(Tile::kElements);
  Tile::store(target.data(), fragment);
  EXPECT_EQ(std::memcmp(target.data(), source.data(), sizeof(T) * source.size()), 0);
}

// Every relation of an element's size to the widest one's.
TEST(CudaWarpTile, LanesSwapWhatTheyMoveForWhatTheyHold) {
  auto generator = fresh_generator();
  expect_each_lane_to_hold_its_positions<WarpTile<4, 2>, float>(generator);
  expect_each_lane_to_hold_its_positions<WarpTile<4, 2>, core::BFloat16>(generator);
  expect_each_lane_to_hold_its_positions<WarpTile<4, 4>, core::Float16>(generator);
  expect_each_lane_to_hold_its_positions<WarpTile<8, 2>, core::BFloat16>(generator);
  expect_each_lane_to_hold_its_positions<WarpTile<4, 4>, std::uint8_t>(generator);
  expect_each_lane_to_hold_its_positions<WarpTile<8, 2>, std::uint8_t>(generator);
  expect_each_lane_to_hold_its_positions<WarpTile<1, 4>, std::uint32_t>(generator);
  expect_each_lane_to_hold_its_positions<WarpTile<4, 8, 8>, float>(generator);
  expect_each_lane_to_hold_its_positions<WarpTile<4, 8, 8>, core::BFloat16>(generator);
  expect_each_lane_to_hold_its_positions<WarpTile<4, 4, 16>, std::uint8_t>(generator);
}

TEST(CudaWarpTile, LanesOfShortRowsHaveAllRowsOfTheirSlice) {
  using Tile = WarpTile<4, 8, 8>;
  EXPECT_EQ(std::pair(Tile::kElements, Tile::kPerLane), std::pair(1024, 32));
  for (const auto& [lane, fragment, position] :
       {std::tuple{0, 0, 0}, {0, 4, 32}, {7, 31, 255}, {8, 0, 256}, {31, 5, 829}}) {
    EXPECT_EQ(Tile::position(lane, fragment), position) << lane << ", " << fragment;
  }
}

TEST(CudaWarpTile, RowsMayBeApart) {
  auto generator = fresh_generator();
  using Tile = WarpTile<1, 4>;
  constexpr std::int64_t stride = 36;
  const auto source = random_bits<std::uint32_t>(3 * stride + Tile::kRow, generator);
  Tile::Fragment<std::uint32_t> fragment;
  Tile::load(source.data(), fragment, stride);
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    for (int row = 0; row < Tile::kRows; ++row) {
      EXPECT_EQ(fragment.at[lane][row], source[static_cast<std::size_t>(row * stride + lane)]);
    }
  }
}

TEST(CudaWarpTile, SomeElementsAreMovedOneByOne) {
  auto generator = fresh_generator();
  using Tile = WarpTile<4, 2>;
  const auto source = random_bits<std::uint32_t>(Tile::kElements, generator);
  for (const auto& [first, last] : {std::pair{0, 0}, {0, 1}, {3, 130}, {127, 256}, {0, 256}}) {
    // Only what may be read, so that a sanitizer sees any other access.
    const std::vector<std::uint32_t> there(source.begin() + first, source.begin() + last);
    Tile::Fragment<std::uint32_t> fragment;
    Tile::load_partial(there.data() - first, first, last, 7U, fragment);
    std::vector<std::uint32_t> target(there.size());
    Tile::store_partial(target.data() - first, first, last, fragment);
    EXPECT_EQ(target, there) << first << " to " << last;
    for (int lane = 0; lane < kWarpLanes; ++lane) {
      for (int k = 0; k < Tile::kPerLane; ++k) {
        const int at = Tile::position(lane, k);
        if (at < first || last <= at) {
          EXPECT_EQ(fragment.at[lane][k], 7U);
        }
      }
    }
  }
}

TEST(CudaWarpTile, ATileHasTheLeastRowsThatItsTypesAllow) {
  using Mixed = WarpTileOf<2, float, core::BFloat16>;
  EXPECT_EQ(std::pair(Mixed::kGroup, Mixed::kRows), std::pair(4, 2));
  using Halves = WarpTileOf<2, core::Float16, core::BFloat16>;
  EXPECT_EQ(std::pair(Halves::kGroup, Halves::kRows), std::pair(8, 2));
  using Bytes = WarpTileOf<1, float, std::uint8_t>;
  EXPECT_EQ(std::pair(Bytes::kGroup, Bytes::kRows), std::pair(4, 4));
}

}  // namespace
}  // namespace zero_ext::cuda
