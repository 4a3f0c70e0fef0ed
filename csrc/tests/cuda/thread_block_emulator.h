// The thread block of csrc/cuda/common/device_thread_block.cuh on the host: a warp is a thread
// whose 32 lanes go in lockstep, and a block of threads is as many of them, which meet at a
// barrier.
//
// It is stricter than a device. Shared memory begins as NaNs. A copy happens at once or at the
// last moment that a wait allows, at random. Addresses that are not multiples of their access, rows
// of matrices that meet in a bank, and warps that do not meet equally often are failures. The
// thread sanitizer sees races between warps, the address sanitizer accesses beyond the memory.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "../../core/base/numeric_types.h"
#include "../../cuda/common/warp_registers.h"

namespace zero_ext::testing {

class EmulatedThreadBlock {
 public:
  static constexpr int kLanes = cuda::kWarpLanes;

  // What warps did.
  struct Counts {
    std::int64_t copied_bytes = 0;  // asked of global memory for shared memory
    std::int64_t matrix_loads = 0;
    std::int64_t products = 0;
    std::int64_t written_bytes = 0;

    Counts& operator+=(const Counts& other) {
      copied_bytes += other.copied_bytes;
      matrix_loads += other.matrix_loads;
      products += other.products;
      written_bytes += other.written_bytes;
      return *this;
    }
  };

  // Of all warps of a block.
  struct Block {
    std::int64_t number;
    int warps;
    std::byte* memory;
    std::int64_t bytes;
    std::barrier<>& barrier;
  };

  EmulatedThreadBlock(const Block& block, int warp, std::uint64_t seed)
      : block_(block), warp_(warp), generator_(seed) {
    groups_.emplace_back();
    begun_.emplace_back(0);
  }

  int warp() const { return warp_; }
  int threads() const { return block_.warps * kLanes; }
  std::int64_t block() const { return block_.number; }
  std::byte* shared_memory() const { return block_.memory; }
  std::int64_t sync_count() const { return sync_count_; }
  const Counts& counts() const { return counts_; }
  // Copies that no wait has covered.
  std::int64_t pending_copies() const {
    return std::accumulate(begun_.begin(), begun_.end(), std::int64_t{0});
  }

  void sync() const {
    ++sync_count_;
    block_.barrier.arrive_and_wait();
  }

  template <int kBytes>
  void copy(void* target, const void* source, bool there) const {
    check_shared(target, kBytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(source) % kBytes, 0U) << "of a source";
    const Copy copy{target, there ? source : nullptr, kBytes};
    ++begun_.back();
    if (there) counts_.copied_bytes += kBytes;
    if (generator_() % 2 == 0) {
      copy.make();
    } else {
      groups_.back().push_back(copy);
    }
  }
  void commit() const {
    groups_.emplace_back();
    begun_.emplace_back(0);
  }
  template <int kGroups>
  void wait() const {
    // The last group is the one that is not committed yet.
    while (groups_.size() > kGroups + 1) {
      for (const Copy& copy : groups_.front()) copy.make();
      groups_.pop_front();
      begun_.pop_front();
    }
  }

  // PTX ISA, "Warp-level matrix load instruction: ldmatrix": .m8n8, .x4, .b16. A lane gets two
  // neighbors of row lane / 4 of each matrix, or with .trans of column lane / 4.
  template <bool kTransposed, class Row>
  void load_matrices(cuda::Registers<std::uint32_t, 4>& matrices, const Row& row) const {
    ++counts_.matrix_loads;
    for (int matrix = 0; matrix < 4; ++matrix) {
      std::uint16_t elements[8][8];
      unsigned banks = 0;
      for (int i = 0; i < 8; ++i) {
        const void* from = row(8 * matrix + i);
        check_shared(from, 16);
        banks |= 1U << (reinterpret_cast<std::uintptr_t>(from) / 16 % 8);
        std::memcpy(elements[i], from, 16);
      }
      EXPECT_EQ(banks, 0xFFU) << "rows of a matrix share banks";
      for (int lane = 0; lane < kLanes; ++lane) {
        const int one = lane / 4;
        const int two = 2 * (lane % 4);
        const std::uint32_t low = kTransposed ? elements[two][one] : elements[one][two];
        const std::uint32_t high = kTransposed ? elements[two + 1][one] : elements[one][two + 1];
        matrices.at[lane][matrix] = low | high << 16;
      }
    }
  }

  // PTX ISA, 9.7.14.5.8 "Matrix Fragments for mma.m16n8k16 with floating point type". Products of
  // 16-bit elements are exact; a device rounds their sums in an order of its own.
  template <class T, int kFirst, int kRight, int kSums>
  void multiply(cuda::Registers<float, kSums>& sums, const cuda::Registers<std::uint32_t, 4>& left,
                const cuda::Registers<std::uint32_t, 4>& right) const {
    static_assert(kFirst % 4 == 0 && kFirst + 4 <= kSums && kRight + 2 <= 4);
    ++counts_.products;
    float a[16][16];
    float b[8][16];  // by columns
    for (int lane = 0; lane < kLanes; ++lane) {
      const int group = lane >> 2;
      const int thread = lane % 4;
      for (int i = 0; i < 8; ++i) {
        const int row = (0 <= i && i < 2) || (4 <= i && i < 6) ? group : group + 8;
        const int column = i < 4 ? thread * 2 + (i & 1) : thread * 2 + (i & 1) + 8;
        a[row][column] = element<T>(left.at[lane][i / 2], i % 2);
      }
      for (int i = 0; i < 4; ++i) {
        const int row = i < 2 ? thread * 2 + (i & 1) : thread * 2 + (i & 1) + 8;
        b[group][row] = element<T>(right.at[lane][kRight + i / 2], i % 2);
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = i < 2 ? lane >> 2 : (lane >> 2) + 8;
        const int column = lane % 4 * 2 + (i & 1);
        float& sum = sums.at[lane][kFirst + i];
        double total = sum;
        for (int k = 0; k < 16; ++k) total += a[row][k] * b[column][k];
        sum = static_cast<float>(total);
      }
    }
  }

  void write16(void* target, const void* source) const {
    check_shared(source, 16);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(target) % 16, 0U) << "of a target";
    counts_.written_bytes += 16;
    std::memcpy(target, source, 16);
  }

 private:
  struct Copy {
    void* target;
    const void* source;  // null: zeros
    int bytes;

    void make() const {
      if (source == nullptr) {
        std::memset(target, 0, static_cast<std::size_t>(bytes));
      } else {
        std::memcpy(target, source, static_cast<std::size_t>(bytes));
      }
    }
  };

  template <class T>
  static float element(std::uint32_t packed, int half) {
    return core::to_float(T{static_cast<std::uint16_t>(packed >> (16 * half))});
  }

  void check_shared(const void* address, int bytes) const {
    const auto offset = static_cast<const std::byte*>(address) - block_.memory;
    EXPECT_EQ(offset % bytes, 0) << "of shared memory";
    EXPECT_TRUE(0 <= offset && offset + bytes <= block_.bytes) << "beyond the shared memory";
  }

  const Block& block_;
  const int warp_;
  mutable std::mt19937_64 generator_;
  mutable std::deque<std::vector<Copy>> groups_;
  mutable std::deque<std::int64_t> begun_;  // copies of each group
  mutable std::int64_t sync_count_ = 0;
  mutable Counts counts_;
};

// Runs `kernel` in `blocks` blocks of threads, each of `warps` warps and `bytes` of shared memory,
// one after another in a random order. Returns what all of them did.
template <class Kernel>
EmulatedThreadBlock::Counts emulate_grid(const Kernel& kernel, std::int64_t blocks, int warps,
                                         int bytes, std::mt19937_64& generator) {
  constexpr std::size_t alignment = 128;
  std::vector<std::int64_t> order(static_cast<std::size_t>(blocks));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::shuffle(order.begin(), order.end(), generator);
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  const std::size_t units = (static_cast<std::size_t>(bytes) + alignment - 1) / alignment;
  const std::unique_ptr<std::byte, Free> memory(
      static_cast<std::byte*>(std::aligned_alloc(alignment, units * alignment)));
  EmulatedThreadBlock::Counts counts;
  for (const std::int64_t number : order) {
    std::memset(memory.get(), 0xFF, units * alignment);
    std::barrier<> barrier(warps);
    const EmulatedThreadBlock::Block block{number, warps, memory.get(), bytes, barrier};
    std::vector<std::int64_t> sync_count(static_cast<std::size_t>(warps));
    std::vector<EmulatedThreadBlock::Counts> each(static_cast<std::size_t>(warps));
    {
      std::vector<std::jthread> running;
      for (int warp = 0; warp < warps; ++warp) {
        running.emplace_back([&, warp, seed = generator()] {
          const EmulatedThreadBlock thread_block(block, warp, seed);
          kernel(thread_block);
          EXPECT_EQ(thread_block.pending_copies(), 0) << "copies that the kernel leaves behind";
          sync_count[static_cast<std::size_t>(warp)] = thread_block.sync_count();
          each[static_cast<std::size_t>(warp)] = thread_block.counts();
          barrier.arrive_and_drop();
        });
      }
    }
    for (const std::int64_t count : sync_count) EXPECT_EQ(count, sync_count[0]);
    for (const EmulatedThreadBlock::Counts& one : each) counts += one;
  }
  return counts;
}

// Runs an attention kernel.
template <class Kernel>
EmulatedThreadBlock::Counts emulate_blocks(const Kernel& kernel, std::mt19937_64& generator) {
  return emulate_grid(kernel, kernel.blocks(), Kernel::Tiling::kWarps,
                      Kernel::template shared_bytes<EmulatedThreadBlock>(), generator);
}

}  // namespace zero_ext::testing
