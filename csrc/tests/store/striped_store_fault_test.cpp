// What a store says and leaves behind when space, devices or bytes fail it.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>

#include "../../core/base/crc32c.h"
#include "../../core/store/block_device_signatures.h"
#include "../../core/store/striped_store.h"
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

// Two devices with stripes of one sector and an extent of eight, which holds random bytes.
class StripedStoreFault : public ::testing::Test {
 protected:
  void open(bool checksum) {
    store_ = std::make_unique<StripedStore>(
        IoEngine::make({.backend = Backend::kThreads, .queue_depth = 4, .block_bytes = kSector}),
        paths_, StripedStoreOptions{.stripe_bytes = kSector, .checksum = checksum});
  }

  void fill(bool checksum) {
    open(checksum);
    store_->reserve(10 * kSector);
    store_->allocate(2 * kSector);
    offset_ = store_->allocate(8 * kSector);
    std::mt19937_64 random = fresh_generator();
    bytes_ = random_bytes(random, 8 * kSector);
    store_->write(offset_, bytes_)->wait();
  }

  // Byte `at` of the extent is byte `at` of an address space that starts one stripe later on each.
  std::pair<std::string, std::int64_t> location(std::int64_t at) const {
    const std::int64_t address = offset_ + at;
    const std::int64_t stripe = address / kSector;
    return {paths_[static_cast<std::size_t>(stripe % 2)], stripe / 2 * kSector + address % kSector};
  }

  void damage(std::int64_t at) {
    const auto [path, offset] = location(at);
    bytes_[static_cast<std::size_t>(at)] ^= std::byte{0x10};
    const int file = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
    ASSERT_EQ(::pwrite(file, &bytes_[static_cast<std::size_t>(at)], 1, offset), 1);
    ::close(file);
  }

  void read_sectors(std::int64_t begin, std::int64_t count) {
    memory_ = std::make_unique<Memory>(static_cast<std::size_t>(count * kSector));
    store_->read(offset_ + begin * kSector, memory_->span())->wait();
  }

  ScratchFolder folder_;
  std::vector<std::string> paths_{folder_.file("a"), folder_.file("b")};
  std::unique_ptr<StripedStore> store_;
  std::unique_ptr<Memory> memory_;
  std::int64_t offset_ = 0;
  Bytes bytes_;
};

std::string hexadecimal(std::uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", value);
  return text;
}

TEST_F(StripedStoreFault, ADamagedByteIsFoundWhereItIsRead) {
  fill(true);
  const std::span<const std::byte> all(bytes_);
  for (const std::int64_t at : {std::int64_t{0}, 3 * kSector + 17, 8 * kSector - 1}) {
    const std::int64_t sector = at / kSector;
    const auto chunk = all.subspan(static_cast<std::size_t>(sector * kSector), kSector);
    const std::uint32_t expected = crc32c(chunk, 0);
    damage(at);
    const auto [path, offset] = location(sector * kSector);
    for (const auto& [begin, count] : {std::pair<std::int64_t, std::int64_t>{0, 8}, {sector, 1}}) {
      const std::string text = error_of([&, first = begin, n = count] { read_sectors(first, n); });
      expect_in("'" + path + "' at offset " + std::to_string(offset) + ": ", text);
      expect_in("expected CRC32C " + hexadecimal(expected), text);
      expect_in("got " + hexadecimal(crc32c(chunk, 0)), text);
    }
    if (sector > 0) read_sectors(0, sector);
    if (sector < 7) read_sectors(sector + 1, 7 - sector);
    damage(at);
    read_sectors(0, 8);
  }
}

TEST_F(StripedStoreFault, AFailedCheckIsTheOutcomeOfEveryWait) {
  fill(true);
  damage(5);
  const Memory memory(kSector);
  const auto handle = store_->read(offset_, memory.span());
  const std::string first = error_of([&] { handle->wait(); });
  EXPECT_EQ(first, error_of([&] { handle->wait(); }));
}

TEST_F(StripedStoreFault, NothingIsVerifiedUnlessAsked) {
  fill(false);
  damage(5);
  read_sectors(0, 8);
  EXPECT_EQ(memory_->copy(), bytes_);
}

TEST_F(StripedStoreFault, SpaceNeverWrittenIsVerifiedAsZeros) {
  open(true);
  store_->reserve(10 * kSector);
  offset_ = store_->allocate(10 * kSector);
  bytes_.resize(10 * kSector);
  read_sectors(0, 10);
  EXPECT_EQ(memory_->copy(), bytes_);
  damage(9 * kSector);
  expect_in("CRC32C", error_of([&] { read_sectors(9, 1); }));
}

TEST_F(StripedStoreFault, ErrorsOfTheDeviceArriveAtTheWaiter) {
  fill(true);
  for (const int reason : {EIO, ENOSPC, EROFS}) {
    store_->inject_fault({IoDirection::kRead, 3, -reason});
    const std::string text = error_of([&] { read_sectors(0, 8); });
    expect_in(folder_.file(""), text);
    expect_in(std::generic_category().message(reason), text);
    read_sectors(0, 8);
    EXPECT_EQ(memory_->copy(), bytes_);
    store_->inject_fault({IoDirection::kWrite, 5, -reason});
    const auto handle = store_->write(offset_, bytes_);
    expect_in(std::generic_category().message(reason), error_of([&] { handle->wait(); }));
    store_->write(offset_, bytes_)->wait();
  }
}

TEST_F(StripedStoreFault, AWriteThatTheDeviceLostIsFoundByTheChecksum) {
  fill(true);
  const Bytes before[] = {content(paths_[0]), content(paths_[1])};
  store_->write(offset_, Bytes(8 * kSector, std::byte{1}))->wait();
  read_sectors(0, 8);
  for (std::size_t i = 0; i < 2; ++i) testing::fill_file(paths_[i], before[i]);
  expect_in("CRC32C", error_of([&] { read_sectors(0, 8); }));
}

TEST_F(StripedStoreFault, InterruptedAndShortTransfersAreContinued) {
  fill(true);
  store_->inject_fault({IoDirection::kRead, 1, -EINTR, 2});
  store_->inject_fault({IoDirection::kRead, 2, 512, 1});
  read_sectors(0, 8);
  EXPECT_EQ(memory_->copy(), bytes_);
  EXPECT_EQ(store_->stats().bytes_read, 8 * kSector);
  EXPECT_EQ(store_->stats().bytes_written, 8 * kSector);
}

TEST_F(StripedStoreFault, ReservingFailsAtomically) {
  open(true);
  store_->reserve(4 * kSector);
  store_->inject_fault({IoDirection::kWrite, 1, -ENOSPC});
  expect_in("No space left on device", error_of([&] { store_->reserve(4000 * kSector); }));
  for (const auto& path : paths_) EXPECT_EQ(std::filesystem::file_size(path), 2 * kSector);
  EXPECT_EQ(store_->stats().capacity, 4 * kSector);
  EXPECT_EQ(store_->allocate(4 * kSector), 0);
  store_->reserve(8 * kSector);
  EXPECT_EQ(store_->allocate(4 * kSector), 4 * kSector);
}

TEST_F(StripedStoreFault, TooLittleSpaceIsSaidBeforeAnythingIsWritten) {
  open(false);
  const auto before = ::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit small{1 << 20, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string text = error_of([&] { store_->reserve(8 << 20); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  ::signal(SIGXFSZ, before);
  expect_in("reserving 4194304 bytes in '" + paths_[0] + "'", text);
  expect_in("bytes are free there", text);
  for (const auto& path : paths_) EXPECT_EQ(std::filesystem::file_size(path), 0);
  store_->reserve(1 << 20);
}

TEST_F(StripedStoreFault, OnlyBlockDevicesPassAsBlockDevices) {
  testing::fill_file(paths_[0], Bytes(4 << 20));
  const auto engine = IoEngine::make({});
  for (const std::string& path : {paths_[0], std::string("/dev/null"), folder_.file("")}) {
    const auto text = error_of([&] { StripedStore(engine, {path}, {.block_devices = true}); });
    expect_in("'" + path + "': expected a block device", text);
  }
  const auto text = error_of([&] { StripedStore(engine, {paths_[1]}, {.block_devices = true}); });
  expect_in("No such file", text);
  EXPECT_EQ(content(paths_[0]), Bytes(4 << 20));
}

// A regular file stands for the device, for what its ends hold does not depend on what it is.
TEST(DeviceMargins, MustHoldZerosOrTheMark) {
  const ScratchFolder folder;
  const std::string path = folder.file("device");
  constexpr std::int64_t kBytes = 4 << 20;
  testing::fill_file(path, Bytes(kBytes));
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  check_signatures(path, file, kBytes);
  ASSERT_TRUE(write_signature(file));
  check_signatures(path, file, kBytes);
  const std::byte one{1};
  const std::byte zero{0};
  for (const std::int64_t at : {std::int64_t{4095}, std::int64_t{4096}, kSignatureBytes - 1,
                                kBytes - kSignatureBytes, kBytes - 1}) {
    ASSERT_EQ(::pwrite(file, &one, 1, at), 1);
    expect_in("'" + path + "': it holds data at offset ",
              error_of([&] { check_signatures(path, file, kBytes); }));
    ASSERT_EQ(::pwrite(file, &zero, 1, at), 1);
    check_signatures(path, file, kBytes);
  }
  for (const std::int64_t at : {kSignatureBytes, kBytes - kSignatureBytes - 1}) {
    ASSERT_EQ(::pwrite(file, &one, 1, at), 1);
    check_signatures(path, file, kBytes);
  }
  ASSERT_TRUE(erase_signature(file));
  check_signatures(path, file, kBytes);
  Bytes expected(kBytes);
  expected[kSignatureBytes] = expected[kBytes - kSignatureBytes - 1] = one;
  EXPECT_EQ(content(path), expected);
  expect_in("at least 3145728 bytes, got 3145727",
            error_of([&] { check_signatures(path, file, 3145727); }));
  ::close(file);
}

}  // namespace
}  // namespace zero_ext::core
