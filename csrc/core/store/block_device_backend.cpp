#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "../base/error_text.h"
#include "../base/unique_fd.h"
#include "block_device_signatures.h"
#include "storage_backend.h"

namespace zero_ext::core {
namespace {

std::runtime_error kernel_failure(const std::string& path, const std::string& action) {
  return make_error("store: block device '", path, "': ", action, " failed, ", errno_text(errno),
                    ". Check the path and its permissions.");
}

// With O_EXCL the kernel lets one holder in, and none while it uses the device itself.
UniqueFd claim(const std::string& path) {
  struct stat status{};
  if (::stat(path.c_str(), &status) != 0) throw kernel_failure(path, "looking at it");
  require(S_ISBLK(status.st_mode), "store: block device '", path,
          "': expected a block device, got something else. Pass the path of one, or use files.");
  UniqueFd claimed(::open(path.c_str(), O_RDWR | O_EXCL | O_CLOEXEC));
  if (!claimed.valid() && errno == EBUSY) {
    throw make_error("store: block device '", path,
                     "': it is in use (mounted, swap, part of another device, or another job's). "
                     "Pass one that nothing uses.");
  }
  if (!claimed.valid()) throw kernel_failure(path, "opening it");
  return claimed;
}

class BlockDeviceBackend final : public StorageBackend {
 public:
  explicit BlockDeviceBackend(const std::string& path)
      : claim_(claim(path)),
        file_(IoFile::open(path, IoFile::Mode::kReadWrite, true)),
        capacity_((file_->size() - 2 * kSignatureBytes) / file_->alignment() * file_->alignment()),
        process_(::getpid()) {
    check_signatures(path, claim_.get(), file_->size());
    if (!write_signature(claim_.get())) throw kernel_failure(path, "marking it");
  }

  ~BlockDeviceBackend() override {
    // A signature that cannot be taken away is recognised by the next store.
    if (::getpid() == process_) static_cast<void>(erase_signature(claim_.get()));
  }
  BlockDeviceBackend(const BlockDeviceBackend&) = delete;
  BlockDeviceBackend& operator=(const BlockDeviceBackend&) = delete;

  const std::shared_ptr<IoFile>& file() const override { return file_; }
  std::int64_t base() const override { return kSignatureBytes; }

  void resize(std::int64_t, std::int64_t to) override {
    require(to <= capacity_, "store: block device '", file_->path(), "': expected room for ", to,
            " bytes, got ", capacity_, ". Use a larger one, or offload less.");
  }

 private:
  UniqueFd claim_;
  std::shared_ptr<IoFile> file_;
  std::int64_t capacity_;
  pid_t process_;
};

}  // namespace

std::unique_ptr<StorageBackend> make_block_device_backend(const std::string& path) {
  return std::make_unique<BlockDeviceBackend>(path);
}

}  // namespace zero_ext::core
