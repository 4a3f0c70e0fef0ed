#include "kernels.h"

#include "../simd/isa.h"

namespace zero_ext::core {

const Kernels& active_kernels() {
#if defined(__x86_64__)
  switch (active_isa()) {
    case Isa::avx512_bf16:
    case Isa::avx512:
      return kAvx512Kernels;
    case Isa::avx2:
      return kAvx2Kernels;
    case Isa::neon:
    case Isa::scalar:
      break;
  }
#elif defined(__aarch64__)
  if (active_isa() == Isa::neon) return kNeonKernels;
#endif
  return kScalarKernels;
}

}  // namespace zero_ext::core
