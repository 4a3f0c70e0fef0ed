// One read or write on its way through an engine, and how it is cut into blocks.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "io_file.h"
#include "transfer_handle.h"

namespace zero_ext::core {

// A piece of a transfer that is given to the kernel at once.
struct Block {
  std::int64_t offset = 0;
  std::span<std::byte> memory;
  bool direct = false;
};

// What a caller asks for.
struct TransferRequest {
  std::shared_ptr<IoFile> file;
  IoDirection direction;
  std::int64_t offset;
  std::span<std::byte> memory;
  std::shared_ptr<void> owner;
};

// Blocks end in any order and on any thread; the transfer ends with the last of them.
class Transfer final : public TransferHandle {
 public:
  Transfer(TransferRequest request, std::int64_t block_bytes);

  const IoFile& file() const { return *request_.file; }
  IoDirection direction() const { return request_.direction; }

  std::int64_t blocks() const { return blocks_; }
  Block block(std::int64_t index) const;

  // Whether a block has failed, so that the others need not be done.
  bool failed() const { return failed_.load(std::memory_order_relaxed); }

  // Marks `count` blocks as ended; the first reason that is not empty stays.
  void end_blocks(std::int64_t count, const std::string& reason);

  // Keeps the owner of the memory until the process ends: the kernel may still use it.
  void keep_owner();

  // "reading 4096 bytes at offset 0 of 'path' failed: " and the reason.
  std::string failure_text(const Block& block, const std::string& reason) const;

  bool done() const override { return ended_.load(std::memory_order_acquire); }
  void wait() override;

 private:
  TransferRequest request_;
  const std::int64_t process_;  // threads, and so completions, do not follow into a forked child
  std::int64_t block_bytes_;
  std::int64_t head_ = 0;  // bytes before the first direct block
  std::int64_t body_ = 0;
  std::int64_t phase_ = 0;  // of the body's start in the file's grid of blocks, at which it is cut
  bool body_direct_ = false;
  std::int64_t blocks_ = 0;

  std::atomic<std::int64_t> left_;
  std::atomic<bool> failed_ = false;
  std::atomic<bool> ended_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string reason_;
};

}  // namespace zero_ext::core
