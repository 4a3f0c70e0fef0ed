#include "io_file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>

#include <algorithm>
#include <cerrno>

#include "../base/error_text.h"

namespace zero_ext::core {

namespace {

std::runtime_error failure(const std::string& action, const std::string& path, int reason) {
  return make_error(action, " '", path, "': ", errno_text(reason),
                    ". Check the path, its permissions and its disk.");
}

bool holds_bytes(const struct stat& status) {
  return S_ISREG(status.st_mode) || S_ISBLK(status.st_mode);
}

std::runtime_error wrong_kind(const std::string& path) {
  return make_error(
      "opening '", path,
      "': expected a regular file or a block device, got something else. Pass another path.");
}

// Looked at before it is opened: opening a pipe would wait for its other end.
void check_kind(const std::string& path) {
  struct stat status{};
  if (::stat(path.c_str(), &status) != 0) throw failure("opening", path, errno);
  if (!holds_bytes(status)) throw wrong_kind(path);
}

struct stat status_of(const UniqueFd& descriptor, const std::string& path) {
  struct stat status{};
  if (::fstat(descriptor.get(), &status) != 0) throw failure("examining", path, errno);
  return status;
}

bool same_file(const struct stat& one, const struct stat& other) {
  return one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

struct Alignments {
  std::int64_t transfer = 4096;
  std::int64_t memory = 4096;
  std::string refusal;
};

// What the kernel asks of direct transfers. Those that cannot say get the page, which serves every
// device in use.
Alignments direct_alignments(const UniqueFd& direct) {
  Alignments found;
  found.transfer = found.memory = std::max<std::int64_t>(4096, ::sysconf(_SC_PAGESIZE));
  struct stat node{};
  struct statfs system{};
  // The node of a block device lies on a tmpfs, its bytes do not.
  if (::fstat(direct.get(), &node) == 0 && S_ISREG(node.st_mode) &&
      ::fstatfs(direct.get(), &system) == 0 &&
      (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC)) {
    found.refusal = "the file system keeps its files in memory (tmpfs or ramfs)";
    return found;
  }
#ifdef STATX_DIOALIGN
  struct statx status{};
  if (::statx(direct.get(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 &&
      (status.stx_mask & STATX_DIOALIGN) != 0) {
    if (status.stx_dio_offset_align == 0) {
      found.refusal = "the file system has no direct transfers for this file";
      return found;
    }
    found.transfer = std::max<std::int64_t>(found.transfer, status.stx_dio_offset_align);
    found.memory = status.stx_dio_mem_align;
  }
#endif
  return found;
}

}  // namespace

std::shared_ptr<IoFile> IoFile::open(const std::string& path, Mode mode, bool prefer_direct) {
  Opened opened;
  opened.path = path;
  opened.writable = mode != Mode::kRead;
  if (mode != Mode::kCreate) check_kind(path);
  const int access = (opened.writable ? O_RDWR : O_RDONLY) | O_CLOEXEC;
  const int creation = mode == Mode::kCreate ? O_CREAT | O_EXCL : 0;
  opened.buffered = UniqueFd(::open(path.c_str(), access | creation, 0600));
  if (!opened.buffered.valid()) {
    throw failure(mode == Mode::kCreate ? "creating" : "opening", path, errno);
  }
  const struct stat status = status_of(opened.buffered, path);
  if (!holds_bytes(status)) throw wrong_kind(path);
  if (!prefer_direct) {
    opened.direct_io_refusal = "direct transfers were not asked for";
    return std::make_shared<IoFile>(std::move(opened));
  }
  UniqueFd direct(::open(path.c_str(), access | O_DIRECT));
  if (!direct.valid() && errno != EINVAL) throw failure("opening", path, errno);
  if (!direct.valid()) {
    opened.direct_io_refusal = "the file system refuses O_DIRECT";
    return std::make_shared<IoFile>(std::move(opened));
  }
  if (!same_file(status_of(direct, path), status)) {
    throw make_error(
        "opening '", path,
        "': it was replaced by another file meanwhile. Let one process at a time use it.");
  }
  Alignments alignments = direct_alignments(direct);
  if (!alignments.refusal.empty()) {
    opened.direct_io_refusal = std::move(alignments.refusal);
    return std::make_shared<IoFile>(std::move(opened));
  }
  opened.alignment = alignments.transfer;
  opened.memory_alignment = alignments.memory;
  opened.direct = std::move(direct);
  // Read-ahead would fill the cache with pages that direct transfers then have to drop.
  ::posix_fadvise(opened.buffered.get(), 0, 0, POSIX_FADV_RANDOM);
  return std::make_shared<IoFile>(std::move(opened));
}

bool IoFile::is_dma_aligned(std::span<const std::byte> memory) const {
  return reinterpret_cast<std::uintptr_t>(memory.data()) %
             static_cast<std::uintptr_t>(opened_.memory_alignment) ==
         0;
}

bool IoFile::replaced() const {
  struct stat there{};
  return ::stat(path().c_str(), &there) != 0 ||
         !same_file(there, status_of(opened_.buffered, path()));
}

std::int64_t IoFile::size() const {
  const struct stat status = status_of(opened_.buffered, path());
  if (!S_ISBLK(status.st_mode)) return status.st_size;
  std::uint64_t bytes = 0;
  if (::ioctl(descriptor(false), BLKGETSIZE64, &bytes) != 0) {
    throw failure("measuring", path(), errno);
  }
  return static_cast<std::int64_t>(bytes);
}

}  // namespace zero_ext::core
