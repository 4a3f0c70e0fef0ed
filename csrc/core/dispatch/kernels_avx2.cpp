#if defined(__x86_64__)

// Everything shared with other targets comes first: what is included inside the region may only
// hold templates over the vector type.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "../compression/block_scale_formula.h"
#include "../norm/superaccumulator_formula.h"
#include "../simd/target_attributes.h"
#include "../simd/vector_scalar.h"
#include "kernels.h"

ZERO_EXT_TARGET_BEGIN("avx2,fma,f16c")

#include "../simd/vector_avx2.h"
#include "kernel_table.h"

namespace zero_ext::core {

constinit const Kernels kAvx2Kernels = make_kernels<Avx2Vector>();

}  // namespace zero_ext::core

ZERO_EXT_TARGET_END

#endif
