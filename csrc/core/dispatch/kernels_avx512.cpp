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

// GCC's own AVX-512 headers start "undefined" vectors from themselves and warn about it.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

ZERO_EXT_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")

#include "../simd/vector_avx512.h"
#include "kernel_table.h"

namespace zero_ext::core {

constinit const Kernels kAvx512Kernels = make_kernels<Avx512Vector>();

}  // namespace zero_ext::core

ZERO_EXT_TARGET_END

#endif
