#include "attention_table.h"
#include "lanes_scalar.h"

namespace zero_ext::core {

constinit const AttentionKernels kScalarAttention =
    make_attention<FloatUnits<ScalarLanes>, FloatUnits<ScalarLanes>>();

}  // namespace zero_ext::core
