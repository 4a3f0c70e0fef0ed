// An open file that transfers go to: one descriptor with O_DIRECT where the file system has it, one
// through the page cache for what is not aligned.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "../base/unique_fd.h"

namespace zero_ext::core {

// A regular file or a block device, closed at destruction; all methods may be called from any
// thread. Bytes written through one descriptor are seen through the other once the write was waited
// for: the kernel writes cached pages back before a direct transfer of them, and drops them after a
// direct write. That holds for pages, so alignment() is never below a page, and no page of a direct
// transfer is shared with a buffered one that does not overlap it. What went through the page cache
// reaches the device later; errors of that write-back are the kernel's to log.
class IoFile {
  struct Opened {
    std::string path;
    bool writable = false;
    UniqueFd buffered;
    UniqueFd direct;
    std::string direct_io_refusal;
    std::int64_t alignment = 1;
    std::int64_t memory_alignment = 1;
  };

 public:
  enum class Mode { kRead, kReadWrite, kCreate };

  // kCreate makes a file that nobody else may read (0600) and fails if there is one. Throws
  // std::runtime_error naming the path and the kernel's reason.
  static std::shared_ptr<IoFile> open(const std::string& path, Mode mode, bool prefer_direct);

  explicit IoFile(Opened&& opened) : opened_(std::move(opened)) {}

  // Whether aligned transfers go past the page cache.
  bool direct() const { return opened_.direct.valid(); }

  // Empty if direct().
  const std::string& direct_io_refusal() const { return opened_.direct_io_refusal; }

  // What offset and length of a direct transfer are multiples of; memory so aligned always serves.
  // 1 when buffered.
  std::int64_t alignment() const { return opened_.alignment; }

  // Whether the device can reach this memory by itself; it often takes less than alignment().
  bool is_dma_aligned(std::span<const std::byte> memory) const;

  // Whether its path leads to another file by now, or to none.
  bool replaced() const;

  bool writable() const { return opened_.writable; }
  const std::string& path() const { return opened_.path; }
  std::int64_t size() const;

  // The descriptor for a piece of a transfer; `direct` only where direct().
  int descriptor(bool direct) const { return (direct ? opened_.direct : opened_.buffered).get(); }

 private:
  const Opened opened_;
};

}  // namespace zero_ext::core
