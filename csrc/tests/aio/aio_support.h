// Helpers shared by the tests of the I/O engine: files of their own, memory, engines.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../core/aio/io_engine.h"

namespace zero_ext::core::testing {

// A folder that goes away with the test.
class ScratchFolder {
 public:
  explicit ScratchFolder(const std::filesystem::path& parent = "/tmp") {
    std::string name = (parent / "zero_ext-aio-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no folder under /tmp");
    path_ = name;
  }
  ~ScratchFolder() { std::filesystem::remove_all(path_); }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  std::string file(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

using Bytes = std::vector<std::byte>;

inline Bytes random_bytes(std::mt19937_64& generator, std::size_t count) {
  Bytes made(count);
  for (auto& value : made) value = static_cast<std::byte>(generator());
  return made;
}

inline void fill_file(const std::string& path, std::span<const std::byte> bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
}

inline Bytes content(const std::string& path) {
  Bytes bytes(std::filesystem::file_size(path));
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  return bytes;
}

// Memory at a chosen distance from a page boundary, poisoned.
class Memory {
 public:
  explicit Memory(std::size_t count, std::size_t shift = 0)
      : storage_(count + shift + kPage, std::byte{0xEE}) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
    bytes_ = std::span(storage_).subspan((kPage - address % kPage) % kPage + shift, count);
  }
  Memory(std::span<const std::byte> from, std::size_t shift = 0) : Memory(from.size(), shift) {
    std::ranges::copy(from, bytes_.begin());
  }
  std::span<std::byte> span() const { return bytes_; }
  Bytes copy() const { return {bytes_.begin(), bytes_.end()}; }

 private:
  static constexpr std::size_t kPage = 4096;
  Bytes storage_;
  std::span<std::byte> bytes_;
};

inline std::vector<Backend> available_backends() {
  std::vector<Backend> found;
  for (const BackendReport& report : probe_backends()) {
    if (report.available) found.push_back(report.backend);
  }
  return found;
}

inline void expect_in(const std::string& expected, const std::string& text) {
  EXPECT_PRED_FORMAT2(::testing::IsSubstring, expected, text);
}

// What the callable's exception says; fails the test if there is none.
template <class Callable>
std::string error_of(const Callable& callable) {
  try {
    callable();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  ADD_FAILURE() << "an exception was expected";
  return "";
}

}  // namespace zero_ext::core::testing
