#include "../attention_table.h"
#include "attention_vector_scalar.h"

namespace zero_ext::core {

constinit const AttentionKernels kScalarAttention =
    make_attention<FloatUnits<ScalarLanes>, FloatUnits<ScalarLanes>>();

}  // namespace zero_ext::core
