// A transfer under way between memory and storage.
#pragma once

namespace zero_ext::core {

// The memory of a transfer belongs to it until wait() has returned or thrown.
class TransferHandle {
 public:
  virtual ~TransferHandle() = default;

  // Whether wait() would not block.
  virtual bool done() const = 0;

  // Returns once every byte has been transferred; throws std::runtime_error naming path, offset,
  // length and the kernel's reason. May be called again, with the same outcome.
  virtual void wait() = 0;
};

}  // namespace zero_ext::core
