// zero_ext::cpu_dispatch_level and set_cpu_dispatch_level: which instruction set the kernels use.
#include "../core/simd/isa.h"

#include "checks.h"

namespace zero_ext::ops {
namespace {

std::int64_t cpu_dispatch_level() { return static_cast<std::int64_t>(core::active_isa()); }

void set_cpu_dispatch_level(std::int64_t level) {
  const auto widest = static_cast<std::int64_t>(core::widest_isa());
  STD_TORCH_CHECK(level >= 0 && level <= widest, "set_cpu_dispatch_level: level: expected 0 to ",
                  widest,
                  " on this machine (0 scalar, 1 AVX2, 2 AVX-512, 3 AVX-512 with bfloat16), got ",
                  level, ". Pass one of these.");
  core::select_isa(static_cast<core::Isa>(level));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_ext, library) {
  library.def("cpu_dispatch_level() -> SymInt");
  library.def("set_cpu_dispatch_level(int level) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CompositeExplicitAutograd, library) {
  library.impl("cpu_dispatch_level", TORCH_BOX(&cpu_dispatch_level));
  library.impl("set_cpu_dispatch_level", TORCH_BOX(&set_cpu_dispatch_level));
}

}  // namespace zero_ext::ops
