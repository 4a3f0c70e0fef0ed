#include "isa.h"

#include <atomic>

namespace zero_ext::core {
namespace {

Isa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return __builtin_cpu_supports("avx512bf16") ? Isa::avx512_bf16 : Isa::avx512;
  }
  if (avx2) return Isa::avx2;
  return Isa::scalar;
#elif defined(__aarch64__)
  return Isa::neon;
#else
  return Isa::scalar;
#endif
}

std::atomic<Isa>& selected() {
  static std::atomic<Isa> isa{widest_isa()};
  return isa;
}

}  // namespace

Isa widest_isa() {
  static const Isa isa = detect();
  return isa;
}

bool has_isa(Isa isa) {
  const Isa widest = widest_isa();
  if (isa == Isa::neon || widest == Isa::neon) return isa == Isa::scalar || isa == widest;
  return isa <= widest;
}

Isa active_isa() { return selected().load(std::memory_order_relaxed); }

bool select_isa(Isa isa) {
  if (!has_isa(isa)) return false;
  selected().store(isa, std::memory_order_relaxed);
  return true;
}

}  // namespace zero_ext::core
