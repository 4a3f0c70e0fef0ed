#if defined(__x86_64__)

// Everything shared with other targets comes first: what is included inside the region may only
// hold templates over the vector type.
#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "../compression/block_scale_formula.h"
#include "../norm/superaccumulator_formula.h"
#include "kernels.h"
#include "target_attributes.h"
#include "vector_scalar.h"

ZERO_EXT_TARGET_BEGIN("avx2,fma,f16c")

#include "kernel_table.h"
#include "vector_avx2.h"

namespace zero_ext::core {

constinit const Kernels kAvx2Kernels = make_kernels<Avx2Vector>();

}  // namespace zero_ext::core

ZERO_EXT_TARGET_END

#endif
