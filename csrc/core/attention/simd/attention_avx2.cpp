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

ZERO_EXT_TARGET_BEGIN("avx2,fma,f16c")

#include "../attention_table.h"
#include "attention_vector_avx2.h"

namespace zero_ext::core {

constinit const AttentionKernels kAvx2Attention =
    make_attention<FloatDotUnit<Avx2AttentionVector>, FloatDotUnit<Avx2AttentionVector>>();

}  // namespace zero_ext::core

ZERO_EXT_TARGET_END

#endif
