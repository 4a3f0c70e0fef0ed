#include "adam_state.h"

#include "../compression/blockwise.h"

namespace zero_ext::core {

std::vector<StateField> adam_fields(AdamMoments moments) {
  switch (moments) {
    case AdamMoments::float32:
      return {{4, 1}, {4, 1}, {4, 1}};
    case AdamMoments::bfloat16:
      return {{4, 1}, {2, 1}, {2, 1}};
    case AdamMoments::blockwise8:
      break;
  }
  return {{4, 1}, {4, kQuantizationBlock}, {4, kQuantizationBlock}, {1, 1}, {1, 1}};
}

}  // namespace zero_ext::core
