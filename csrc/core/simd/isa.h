// Instruction sets the kernels exist for, and which of them runs.
#pragma once

#include <cstdint>

namespace zero_ext::core {

// avx512_bf16 has products of bfloat16 pairs beside avx512; only attention makes use of them.
enum class Isa : std::uint8_t { scalar = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3 };

// The widest instruction set this machine can run.
Isa widest_isa();

// The instruction set that kernels run with: the widest one until select_isa says otherwise.
Isa active_isa();

// Makes kernels run with `isa`; false, and no change, when this machine cannot run it.
bool select_isa(Isa isa);

}  // namespace zero_ext::core
