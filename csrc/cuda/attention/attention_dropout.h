// Which attention weights are dropped, drawn as the CPU draws them.
#pragma once

#include <cstdint>

#include "../../core/attention/score_formula.h"

namespace zero_ext::cuda {

// Of one batch and query head.
struct HeadDropout {
  bool drops;
  std::uint32_t threshold;
  float scale;  // of the weights that stay
  core::DropoutDraw draw;

  // What the weights of a query and of two neighboring keys, the first of them even, are
  // multiplied with: `scale`, or 0 for the dropped ones.
  ZERO_EXT_HOST_DEVICE void factors(std::int32_t query, std::int32_t even_key,
                                    float (&pair)[2]) const {
    const core::Philox4 drawn = words(query, even_key);
    const bool low = even_key % 4 == 0;
    pair[0] = of(low ? drawn.words[0] : drawn.words[2]);
    pair[1] = of(low ? drawn.words[1] : drawn.words[3]);
  }
  ZERO_EXT_HOST_DEVICE float factor(std::int32_t query, std::int32_t key) const {
    float pair[2];
    factors(query, key & ~1, pair);
    return key % 2 == 0 ? pair[0] : pair[1];
  }

 private:
  ZERO_EXT_HOST_DEVICE core::Philox4 words(std::int32_t query, std::int32_t key) const {
    return core::dropout_words(draw, static_cast<std::uint32_t>(query),
                               static_cast<std::uint32_t>(key & ~3));
  }
  ZERO_EXT_HOST_DEVICE float of(std::uint32_t word) const {
    return word < threshold ? 0.0F : scale;
  }
};

struct Dropout {
  double probability;
  std::uint64_t seed;
  std::uint32_t offset;

  ZERO_EXT_FUNCTION HeadDropout of(std::int64_t batch_and_head) const {
    return {probability > 0.0,
            core::drop_threshold(probability),
            static_cast<float>(1.0 / (1.0 - probability)),
            {seed, offset, static_cast<std::uint32_t>(batch_and_head)}};
  }
};

}  // namespace zero_ext::cuda
