// A thread block of the device, for kernels that whole blocks run: shared memory, copies to it and
// products of matrices. Exchanges between lanes are in warp_shuffle.h.
// csrc/tests/cuda/thread_block_emulator.h has the same members for the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "../../core/base/numeric_types.h"
#include "warp_registers.h"
#include "warp_shuffle.h"

namespace zero_ext::cuda {

class DeviceThreadBlock {
 public:
  __device__ __forceinline__ explicit DeviceThreadBlock(std::byte* memory) : memory_(memory) {}

  __device__ __forceinline__ int warp() const { return threadIdx.x / kWarpLanes; }
  __device__ __forceinline__ int threads() const { return blockDim.x; }
  __device__ __forceinline__ std::int64_t block() const { return blockIdx.x; }
  __device__ __forceinline__ std::byte* shared_memory() const { return memory_; }

  // All threads of the block see what the others wrote before.
  __device__ __forceinline__ void sync() const { __syncthreads(); }

  // Begins to copy kBytes to shared memory, or to fill them with zeros. Both addresses are
  // multiples of kBytes; what was begun before a commit is there after the wait that covers it.
  template <int kBytes>
  __device__ __forceinline__ void copy(void* target, const void* source, bool there) const {
    const auto to = static_cast<std::uint32_t>(__cvta_generic_to_shared(target));
    const int bytes = there ? kBytes : 0;
    if constexpr (kBytes == 16) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(source),
                   "r"(bytes)
                   : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(to), "l"(source),
                   "n"(kBytes), "r"(bytes)
                   : "memory");
    }
  }
  __device__ __forceinline__ void commit() const {
    asm volatile("cp.async.commit_group;\n" ::: "memory");
  }
  // Until at most the last kGroups commits of the running thread are still on their way.
  template <int kGroups>
  __device__ __forceinline__ void wait() const {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(kGroups) : "memory");
  }

  // Four matrices of 8 x 8 elements of 16 bits, each row of 16 bytes at the address that
  // row(lane) gives: those of lanes 8 i to 8 i + 7 are the rows of matrix i.
  template <bool kTransposed, class Row>
  __device__ __forceinline__ void load_matrices(Registers<std::uint32_t, 4>& matrices,
                                                const Row& row) const {
    const auto from = static_cast<std::uint32_t>(__cvta_generic_to_shared(row(lane_number(0))));
    std::uint32_t (&to)[4] = matrices.at[0];
    if constexpr (kTransposed) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                   : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                   : "r"(from)
                   : "memory");
    } else {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                   : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                   : "r"(from)
                   : "memory");
    }
  }

  // sums.at[.][kFirst ...] += left (16 x 16, rows first) times right (16 x 8, columns first), whose
  // registers are right.at[.][kRight] and the next.
  template <class T, int kFirst, int kRight, int kSums>
  __device__ __forceinline__ void multiply(Registers<float, kSums>& sums,
                                           const Registers<std::uint32_t, 4>& left,
                                           const Registers<std::uint32_t, 4>& right) const {
    float* to = &sums.at[0][kFirst];
    const std::uint32_t (&a)[4] = left.at[0];
    const std::uint32_t b[2] = {right.at[0][kRight], right.at[0][kRight + 1]};
    if constexpr (std::is_same_v<T, core::BFloat16>) {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
          : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
          : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
  }

  // 16 bytes from shared memory, both addresses multiples of 16.
  __device__ __forceinline__ void write16(void* target, const void* source) const {
    *static_cast<uint4*>(target) = *static_cast<const uint4*>(source);
  }

 private:
  std::byte* memory_;
};

}  // namespace zero_ext::cuda
