#include "../attention_table.h"
#include "attention_vector_scalar.h"

namespace zero_ext::core {

constinit const AttentionKernels kScalarAttention =
    make_attention<FloatDotUnit<ScalarAttentionVector>, FloatDotUnit<ScalarAttentionVector>>();

}  // namespace zero_ext::core
