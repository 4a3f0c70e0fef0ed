// zero_ext::isa_level and set_isa_level: which instruction set the kernels use.
#include "../core/simd/isa.h"

#include "checks.h"

namespace zero_ext::ops {
namespace {

std::int64_t isa_level() { return static_cast<std::int64_t>(core::active_isa()); }

void set_isa_level(std::int64_t level) {
  const auto widest = static_cast<std::int64_t>(core::widest_isa());
  STD_TORCH_CHECK(level >= 0 && level <= widest, "set_isa_level: level is ", level,
                  "; this machine has the levels 0 to ", widest,
                  " (0 scalar, 1 AVX2, 2 AVX-512, "
                  "3 AVX-512 with bfloat16)");
  core::select_isa(static_cast<core::Isa>(level));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_ext, library) {
  library.def("isa_level() -> SymInt");
  library.def("set_isa_level(int level) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CompositeExplicitAutograd, library) {
  library.impl("isa_level", TORCH_BOX(&isa_level));
  library.impl("set_isa_level", TORCH_BOX(&set_isa_level));
}

}  // namespace zero_ext::ops
