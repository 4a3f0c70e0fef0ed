#if defined(__x86_64__)

// Everything shared with other targets comes first: what is included inside the region may only
// hold templates over the vector type, or what lies in an unnamed namespace.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../../simd/target_attributes.h"
#include "../../simd/vector_scalar.h"
#include "../attention_kernels.h"
#include "../score_formula.h"

// GCC's own AVX-512 headers start "undefined" vectors from themselves and warn about it.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

ZERO_EXT_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c")

#include "../attention_table.h"
#include "attention_vector_avx512.h"
#include "dot_unit_bf16.h"

namespace zero_ext::core {

constinit const AttentionKernels kAvx512BFloat16Attention =
    make_attention<FloatDotUnit<Avx512AttentionVector>, Bf16DotUnit<Avx512AttentionVector>>();

}  // namespace zero_ext::core

ZERO_EXT_TARGET_END

#endif
