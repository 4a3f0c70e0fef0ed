// What the works of a communicator do on its stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch_order.h"
#include "memory_space.h"
#include "reduction.h"
#include "streams.h"

namespace stand_in {

// A collective or transfer: this rank's tensors for every other rank and of every other, and its
// own for itself. Undefined where there is nothing.
struct Movement {
  LaunchText text;
  std::vector<at::Tensor> sends;
  std::vector<at::Tensor> receives;
  // With it, what arrives is reduced into `result`, in slices or, for one of them, as that slice.
  std::optional<Reduction> reduction = {};
  at::Tensor result = {};
  int slice = -1;
};

// Movements that go on at the same time. Results are poison from the launch until all is done.
class GroupWork : public std::enable_shared_from_this<GroupWork> {
 public:
  // Begins after what the current stream of the device has to do so far.
  static std::shared_ptr<GroupWork> launch(const std::shared_ptr<Group>& group, Stream& stream,
                                           const std::vector<Movement>& movements,
                                           std::chrono::milliseconds limit);

  // The stream goes on after this, or fails as this did.
  void block(Stream& stream);
  bool poll() { return stream_->poll(ticket_); }
  // The host waits; throws the failure.
  void await();
  // The failure so far, on whatever rank.
  void check() const;

 private:
  struct Block;
  struct Job;

  void prepare();
  void run();
  bool failed() const;

  std::shared_ptr<Group> group_;
  Stream* stream_ = nullptr;
  std::uint64_t ticket_ = 0;
  std::chrono::milliseconds limit_{};
  std::vector<Job> jobs_;
  mutable std::mutex mutex_;
  std::string failure_;
};

}  // namespace stand_in
