// zero_ext::cpu_dispatch_level and set_cpu_dispatch_level: which instruction set the kernels use.
#include "../core/simd/isa.h"

#include <string>

#include "checks.h"
#include "op_registration.h"

namespace zero_ext::ops {
namespace {

std::int64_t cpu_dispatch_level() { return static_cast<std::int64_t>(core::active_isa()); }

void set_cpu_dispatch_level(std::int64_t level) {
  std::string available;
  bool is_available = false;
  for (const core::Isa isa : core::kAllIsas) {
    if (!core::has_isa(isa)) continue;
    const auto own = static_cast<std::int64_t>(isa);
    if (!available.empty()) available += ", ";
    available += std::to_string(own);
    is_available = is_available || own == level;
  }
  STD_TORCH_CHECK(is_available, "set_cpu_dispatch_level: level: expected one of ", available,
                  " on this machine (0 scalar, 1 AVX2, 2 AVX-512, 3 AVX-512 with bfloat16, "
                  "4 NEON), got ",
                  level, ". Pass one of these.");
  core::select_isa(static_cast<core::Isa>(level));
}

}  // namespace

ZERO_EXT_OPS(CompositeExplicitAutograd) {
  ops("cpu_dispatch_level() -> SymInt", TORCH_BOX(&cpu_dispatch_level));
  ops("set_cpu_dispatch_level(int level) -> ()", TORCH_BOX(&set_cpu_dispatch_level));
}

}  // namespace zero_ext::ops
