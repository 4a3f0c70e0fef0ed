// The storage behind a store: a file of its own, or a whole block device.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "../aio/io_file.h"

namespace zero_ext::core {

// All failures are std::runtime_error naming the path.
class StorageBackend {
 public:
  virtual ~StorageBackend() = default;

  virtual const std::shared_ptr<IoFile>& file() const = 0;

  // Where the store's first byte lies in file().
  virtual std::int64_t base() const = 0;

  // Makes room for `to` bytes after base() where there was room for `from`, or gives the difference
  // back. Too little space is an error now, and nothing has changed then.
  virtual void resize(std::int64_t from, std::int64_t to) = 0;
};

// A new private file, removed with the object (but not by a forked child's copy of it).
std::unique_ptr<StorageBackend> make_file_backend(const std::string& path);

// A block device, overwritten between its first and its last MiB. These two must hold zeros, or the
// signature that a store leaves on the device as long as it uses it: what file systems, partition
// tables, swap, volume managers and RAID write at one end of a device or the other makes it
// refused, as does anything else there. So does a claim on the device or on a partition of it by
// the kernel (mounted in any namespace, swap, RAID member) or by another store.
std::unique_ptr<StorageBackend> make_block_device_backend(const std::string& path);

}  // namespace zero_ext::core
