// The store against plain vectors of bytes, and what it leaves on disk.
#include "../../core/store/striped_store.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <map>

#include "../../core/base/crc32c.h"
#include "../../core/store/striping.h"
#include "../aio/aio_support.h"
#include "../test_support.h"

namespace zero_ext::core {
namespace {

using testing::Bytes;
using testing::content;
using testing::error_of;
using testing::expect_in;
using testing::fresh_generator;
using testing::Memory;
using testing::random_bytes;
using testing::ScratchFolder;

constexpr std::int64_t kSector = 4096;

std::shared_ptr<IoEngine> engine(Backend backend = Backend::kThreads) {
  return IoEngine::make({.backend = backend, .queue_depth = 4, .block_bytes = 4 * kSector});
}

std::vector<std::string> names(const ScratchFolder& folder, std::size_t count) {
  std::vector<std::string> found;
  for (std::size_t i = 0; i < count; ++i) found.push_back(folder.file(std::to_string(i)));
  return found;
}

bool exists(const std::string& path) { return std::filesystem::exists(path); }

void write_and_wait(StripedStore& store, std::int64_t offset, std::span<const std::byte> bytes) {
  store.write(offset, bytes)->wait();
}

// Where byte `address` of the address space lies, by counting: device and offset there.
std::pair<std::size_t, std::int64_t> location_of(std::int64_t address, std::size_t devices,
                                                 std::int64_t stripe) {
  const auto number = static_cast<std::size_t>(address / stripe);
  return {number % devices,
          static_cast<std::int64_t>(number / devices) * stripe + address % stripe};
}

TEST(Striping, PutsEveryByteWhereCountingPutsIt) {
  std::mt19937_64 random = fresh_generator();
  for (int trial = 0; trial < 300; ++trial) {
    const std::size_t devices = 1 + random() % 4;
    const auto stripe = static_cast<std::int64_t>(1 + random() % 20);
    const auto offset = static_cast<std::int64_t>(random() % 100);
    const auto bytes = static_cast<std::int64_t>(random() % 150);
    const Striping striping(devices, stripe);
    std::int64_t done = 0;
    for (const StripeExtent& extent : striping.extents(offset, bytes)) {
      ASSERT_EQ(extent.transfer_offset, done);
      for (std::int64_t i = 0; i < extent.bytes; ++i, ++done) {
        const std::pair found(extent.device, extent.device_offset + i);
        ASSERT_EQ(found, location_of(offset + done, devices, stripe));
      }
    }
    EXPECT_EQ(done, bytes);
    std::vector<std::int64_t> counts(devices, 0);
    for (std::int64_t at = 0; at < offset; ++at) ++counts[location_of(at, devices, stripe).first];
    for (std::size_t i = 0; i < devices; ++i) {
      EXPECT_EQ(striping.device_bytes(i, offset), counts[i]);
    }
  }
}

struct Extent {
  std::int64_t offset;
  Bytes bytes;
};

// Random transfers on one store, and the same on vectors.
class RandomTransfers {
 public:
  RandomTransfers(StripedStore& store, std::mt19937_64& random) : store_(store), random_(random) {}

  void step() {
    const std::uint64_t kind = random_() % 8;
    if (kind < 2 || live_.empty()) return allocate();
    Extent& extent = live_[random_() % live_.size()];
    const std::size_t sectors = extent.bytes.size() / kSector;
    const std::size_t begin = random_() % sectors;
    const std::size_t count = random_() % (sectors - begin + 1);
    const std::int64_t offset = extent.offset + static_cast<std::int64_t>(begin) * kSector;
    const auto expected = std::span(extent.bytes).subspan(begin * kSector, count * kSector);
    if (kind == 2) {
      release(extent);
    } else if (kind < 5) {
      std::ranges::copy(random_bytes(random_, expected.size()), expected.begin());
      write_and_wait(store_, offset, Memory(expected).span());
      written_ += static_cast<std::int64_t>(expected.size());
    } else {
      const Memory memory(expected.size(), random_() % 2 * 64);
      store_.read(offset, memory.span())->wait();
      ASSERT_TRUE(std::ranges::equal(memory.span(), expected)) << "at " << offset;
      read_ += static_cast<std::int64_t>(expected.size());
    }
  }

  const std::vector<Extent>& live() const { return live_; }
  std::int64_t read() const { return read_; }
  std::int64_t written() const { return written_; }

 private:
  void allocate() {
    const auto bytes = static_cast<std::int64_t>(1 + random_() % (20 * kSector));
    const std::int64_t rounded = (bytes + kSector - 1) / kSector * kSector;
    try {
      live_.push_back({store_.allocate(bytes), Bytes(static_cast<std::size_t>(rounded))});
    } catch (const std::runtime_error&) {
      if (live_.empty()) throw;
      return release(live_.front());
    }
    const Extent& extent = live_.back();
    std::ranges::generate(live_.back().bytes, [&] { return static_cast<std::byte>(random_()); });
    write_and_wait(store_, extent.offset, extent.bytes);
    written_ += rounded;
  }

  void release(Extent& extent) {
    store_.release(extent.offset);
    std::swap(extent, live_.back());
    live_.pop_back();
  }

  StripedStore& store_;
  std::mt19937_64& random_;
  std::vector<Extent> live_;
  std::int64_t read_ = 0;
  std::int64_t written_ = 0;
};

TEST(StripedStore, RetainsWhatWasWrittenOnEveryBackend) {
  std::mt19937_64 random = fresh_generator();
  for (const Backend backend : testing::available_backends()) {
    for (std::size_t devices = 1; devices <= 3; ++devices) {
      const ScratchFolder folder;
      const std::int64_t stripe = static_cast<std::int64_t>(1 + random() % 3) * kSector;
      const auto paths = names(folder, devices);
      StripedStore store(engine(backend), paths,
                         {.stripe_bytes = stripe, .checksum = random() % 2 == 0});
      store.reserve(100 * kSector);
      RandomTransfers transfers(store, random);
      for (int step = 0; step < 120; ++step) {
        transfers.step();
        if (step == 60) store.reserve(133 * kSector - 5);
      }
      const StripedStoreStats stats = store.stats();
      EXPECT_EQ(stats.capacity, 133 * kSector);
      EXPECT_EQ(stats.bytes_read, transfers.read());
      EXPECT_EQ(stats.bytes_written, transfers.written());
      std::vector<Bytes> files;
      for (const auto& path : paths) files.push_back(content(path));
      std::int64_t live = 0;
      for (const Extent& extent : transfers.live()) {
        live += static_cast<std::int64_t>(extent.bytes.size());
        for (std::size_t i = 0; i < extent.bytes.size(); ++i) {
          const auto address = extent.offset + static_cast<std::int64_t>(i);
          const auto [device, at] = location_of(address, devices, stripe);
          ASSERT_EQ(files[device][static_cast<std::size_t>(at)], extent.bytes[i]);
        }
      }
      EXPECT_EQ(stats.live_bytes, live);
    }
  }
}

TEST(StripedStore, ServesManyThreads) {
  const ScratchFolder folder;
  StripedStore store(engine(), names(folder, 2), {.stripe_bytes = kSector, .checksum = true});
  store.reserve(64 * kSector);
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&store, thread] {
      std::mt19937_64 random(static_cast<std::uint64_t>(thread));
      for (int round = 0; round < 20; ++round) {
        const std::int64_t offset = store.allocate(5 * kSector);
        const Bytes bytes = random_bytes(random, 5 * kSector);
        write_and_wait(store, offset, bytes);
        if (thread == 0) store.reserve((65 + round) * kSector);
        const Memory memory(bytes.size());
        store.read(offset, memory.span())->wait();
        EXPECT_EQ(memory.copy(), bytes);
        store.release(offset);
      }
    });
  }
  threads.clear();
  EXPECT_EQ(store.stats().live_bytes, 0);
  EXPECT_EQ(store.stats().bytes_written, 4 * 20 * 5 * kSector);
}

TEST(StripedStore, OwnsPrivateFilesAndRemovesThem) {
  const ScratchFolder folder;
  const auto paths = names(folder, 2);
  {
    StripedStore store(engine(), paths, {.stripe_bytes = kSector});
    for (const auto& path : paths) {
      struct stat status{};
      ASSERT_EQ(::stat(path.c_str(), &status), 0);
      EXPECT_EQ(status.st_mode & 07777, 0600U);
    }
    const pid_t child = ::fork();
    if (child == 0) {
      std::destroy_at(&store);
      ::_exit(0);
    }
    ::waitpid(child, nullptr, 0);
    EXPECT_TRUE(exists(paths[0]) && exists(paths[1]));
  }
  EXPECT_FALSE(exists(paths[0]) || exists(paths[1]));
}

TEST(StripedStore, LeavesFilesOfOthersAlone) {
  const ScratchFolder folder;
  const auto paths = names(folder, 2);
  const Bytes precious(10, std::byte{7});
  testing::fill_file(paths[1], precious);
  expect_in(paths[1], error_of([&] { StripedStore(engine(), paths, {}); }));
  EXPECT_FALSE(exists(paths[0]));
  EXPECT_EQ(content(paths[1]), precious);
  std::filesystem::create_symlink(paths[1], paths[0]);
  expect_in(paths[0], error_of([&] { StripedStore(engine(), {paths[0]}, {}); }));
  EXPECT_EQ(content(paths[1]), precious);
  EXPECT_TRUE(std::filesystem::is_symlink(paths[0]));
  const std::string absent = folder.file("absent/0");
  expect_in(absent, error_of([&] { StripedStore(engine(), {absent}, {}); }));
}

TEST(StripedStore, RefusesOptionsThatMakeNoSense) {
  const ScratchFolder folder;
  const auto paths = names(folder, 1);
  for (const std::int64_t stripe : {std::int64_t{0}, std::int64_t{-kSector}, kSector + 512}) {
    const auto text = error_of([&] { StripedStore(engine(), paths, {.stripe_bytes = stripe}); });
    expect_in("got " + std::to_string(stripe) + ".", text);
    EXPECT_FALSE(exists(paths[0]));
  }
  expect_in("expected at least one path, got none",
            error_of([&] { StripedStore(engine(), {}, {}); }));
}

TEST(StripedStore, ReservesBlocksAndZeros) {
  const ScratchFolder folder;
  const auto paths = names(folder, 2);
  StripedStore store(engine(), paths, {.stripe_bytes = 2 * kSector});
  store.reserve(9 * kSector + 1);
  EXPECT_EQ(content(paths[0]), Bytes(6 * kSector));
  EXPECT_EQ(content(paths[1]), Bytes(4 * kSector));
  for (const auto& path : paths) {
    struct stat status{};
    ASSERT_EQ(::stat(path.c_str(), &status), 0);
    EXPECT_GE(status.st_blocks * 512, status.st_size);
  }
  EXPECT_EQ(store.stats().capacity, 10 * kSector);
  EXPECT_EQ(store.stats().bytes_written, 0);
  expect_in("2^56, got 4096.", error_of([&] { store.reserve(kSector); }));
  expect_in("2^56, got 9223372036854775807.", error_of([&] { store.reserve(INT64_MAX); }));
  expect_in("got 40960 as the largest", error_of([&] { store.allocate(11 * kSector); }));
}

TEST(StripedStore, RefusesTransfersOutsideOneExtent) {
  const ScratchFolder folder;
  StripedStore store(engine(), names(folder, 1), {});
  store.reserve(10 * kSector);
  const std::int64_t first = store.allocate(2 * kSector);
  const std::int64_t second = store.allocate(2 * kSector);
  const Memory memory(3 * kSector);
  const auto bytes = memory.span();
  const std::pair<std::int64_t, std::size_t> wrong[] = {{first, 3 * kSector},
                                                        {second + kSector, 2 * kSector},
                                                        {second + 2 * kSector, kSector},
                                                        {-kSector, kSector},
                                                        {INT64_MAX - kSector + 1, kSector}};
  for (const auto& [offset, count] : wrong) {
    const auto text = error_of([&] { store.read(offset, bytes.first(count)); });
    expect_in("expected a range inside one allocated extent", text);
    expect_in("offset " + std::to_string(offset), text);
    EXPECT_THROW(store.write(offset, bytes.first(count)), std::runtime_error);
  }
  expect_in("multiples of 4096", error_of([&] { store.read(first + 1, bytes.first(kSector)); }));
  expect_in("multiples of 4096", error_of([&] { store.write(first, bytes.first(100)); }));
  store.release(first);
  EXPECT_THROW(store.read(first, bytes.first(kSector)), std::runtime_error);
  EXPECT_EQ(store.stats().bytes_read + store.stats().bytes_written, 0);
}

TEST(StripedStore, HoldsOwnersAsLongAsItNeedsTheMemory) {
  const ScratchFolder folder;
  StripedStore store(engine(), names(folder, 1), {.checksum = true});
  store.reserve(2 * kSector);
  const std::int64_t offset = store.allocate(2 * kSector);
  auto owner = std::make_shared<Memory>(2 * kSector);
  const std::weak_ptr<Memory> alive = owner;
  const auto handle = store.read(offset, owner->span(), owner);
  owner.reset();
  while (!handle->done()) std::this_thread::yield();
  EXPECT_FALSE(alive.expired());
  handle->wait();
  handle->wait();
}

}  // namespace
}  // namespace zero_ext::core
