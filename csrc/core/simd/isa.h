// Instruction sets the kernels exist for, and which of them runs.
#pragma once

#include <cstdint>

namespace zero_ext::core {

// avx512_bf16 has products of bfloat16 pairs beside avx512; only attention makes use of them. neon
// is that of 64-bit Arm, the others but scalar those of x86-64.
enum class Isa : std::uint8_t { scalar = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3, neon = 4 };

inline constexpr Isa kAllIsas[] = {Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512_bf16,
                                   Isa::neon};

// The widest instruction set this machine can run.
Isa widest_isa();

// Whether this machine can run it.
bool has_isa(Isa isa);

// The instruction set that kernels run with: the widest one until select_isa says otherwise.
Isa active_isa();

// Makes kernels run with `isa`; false, and no change, when this machine cannot run it.
bool select_isa(Isa isa);

}  // namespace zero_ext::core
