// Files: direct or not, and why; what is refused.
#include "../../core/aio/io_file.h"

#include <sys/stat.h>

#include "aio_support.h"

namespace zero_ext::core {
namespace {

using testing::content;
using testing::error_of;
using testing::expect_in;
using testing::fill_file;
using testing::ScratchFolder;

TEST(AioFile, CreatesAPrivateFileOnce) {
  const ScratchFolder folder;
  const std::string path = folder.file("made");
  const auto file = IoFile::open(path, IoFile::Mode::kCreate, true);
  EXPECT_EQ(file->path(), path);
  EXPECT_TRUE(file->writable());
  EXPECT_EQ(file->size(), 0);
  struct stat status{};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600U);
  expect_in("creating '" + path + "': File exists (errno 17)",
            error_of([&] { IoFile::open(path, IoFile::Mode::kCreate, true); }));
}

TEST(AioFile, DirectTransfersNeedFullPages) {
  const ScratchFolder folder;
  const auto file = IoFile::open(folder.file("a"), IoFile::Mode::kCreate, true);
  ASSERT_TRUE(file->direct()) << file->direct_io_refusal();
  EXPECT_EQ(file->alignment() % ::sysconf(_SC_PAGESIZE), 0);
  EXPECT_TRUE(file->direct_io_refusal().empty());
}

TEST(AioFile, SaysWhyItIsBuffered) {
  const ScratchFolder folder;
  const ScratchFolder in_memory("/dev/shm");
  const auto tmpfs = IoFile::open(in_memory.file("a"), IoFile::Mode::kCreate, true);
  EXPECT_FALSE(tmpfs->direct());
  EXPECT_EQ(tmpfs->alignment(), 1);
  expect_in("tmpfs", tmpfs->direct_io_refusal());
  const auto unasked = IoFile::open(folder.file("a"), IoFile::Mode::kCreate, false);
  EXPECT_FALSE(unasked->direct());
  expect_in("not asked for", unasked->direct_io_refusal());
}

TEST(AioFile, KnowsItsSizeAndMode) {
  const ScratchFolder folder;
  fill_file(folder.file("a"), testing::Bytes(12345));
  const auto file = IoFile::open(folder.file("a"), IoFile::Mode::kRead, true);
  EXPECT_EQ(file->size(), 12345);
  EXPECT_FALSE(file->writable());
  EXPECT_TRUE(IoFile::open(folder.file("a"), IoFile::Mode::kReadWrite, true)->writable());
  EXPECT_EQ(content(folder.file("a")).size(), 12345U);
}

TEST(AioFile, NoticesWhenItsPathLeadsElsewhere) {
  const ScratchFolder folder;
  const std::string path = folder.file("a");
  const auto file = IoFile::open(path, IoFile::Mode::kCreate, true);
  EXPECT_FALSE(file->replaced());
  std::filesystem::remove(path);
  EXPECT_TRUE(file->replaced());
  fill_file(path, testing::Bytes(1));
  EXPECT_TRUE(file->replaced());
}

TEST(AioFile, RefusesWhatHoldsNoBytes) {
  const ScratchFolder folder;
  const std::string pipe = folder.file("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& path : {pipe, folder.file(""), std::string("/dev/null")}) {
    expect_in("'" + path + "': expected a regular file or a block device",
              error_of([&] { IoFile::open(path, IoFile::Mode::kRead, true); }));
  }
  const std::string missing = folder.file("missing");
  expect_in("opening '" + missing + "': No such file or directory (errno 2)",
            error_of([&] { IoFile::open(missing, IoFile::Mode::kReadWrite, true); }));
}

}  // namespace
}  // namespace zero_ext::core
