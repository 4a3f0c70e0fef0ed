#if defined(__aarch64__)

#include "../attention_table.h"
#include "attention_vector_neon.h"

namespace zero_ext::core {

constinit const AttentionKernels kNeonAttention =
    make_attention<FloatDotUnit<NeonAttentionVector>, FloatDotUnit<NeonAttentionVector>>();

}  // namespace zero_ext::core

#endif
