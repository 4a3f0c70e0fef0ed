// Two ranks of an exchange in one process.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../../core/transport/cross_process_transport.h"

namespace zero_ext::core {

using Bytes = std::vector<std::byte>;
inline constexpr std::int64_t kTag = 7;

inline std::string unique_name() {
  std::random_device random;
  return "/zero_ext-test-" + std::to_string(::getpid()) + "-" + std::to_string(random());
}

inline Bytes random_bytes(std::size_t count, std::mt19937& random) {
  Bytes made(count);
  for (auto& value : made) value = static_cast<std::byte>(random());
  return made;
}

class Pair {
 public:
  Pair() {
    const std::string name = unique_name();
    ranks_[0] = std::make_unique<CrossProcessTransport>(name, 0, 2, true);
    ranks_[1] = std::make_unique<CrossProcessTransport>(name, 1, 2, false);
    SharedMemorySegment::unlink(name);
    connected_ = ranks_[0]->connect() && ranks_[1]->connect();
  }
  CrossProcessTransport& operator[](int rank) { return *ranks_[rank]; }
  void close(int rank) { ranks_[rank].reset(); }
  bool connected() const { return connected_; }

 private:
  std::unique_ptr<CrossProcessTransport> ranks_[2];
  bool connected_ = false;
};

}  // namespace zero_ext::core
