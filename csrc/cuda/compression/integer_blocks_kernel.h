// Blocks of elements to integers of 4 or 8 bits, and back: see
// ../../core/compression/integer_block_formula.h for the payload and the arithmetic.
//
// A warp takes runs of kRunBlocks neighboring blocks of kRegisterBlock elements, which it has in
// registers: what is quantized is read once. Eight lanes have a block, as rows of 32 elements, of
// which each has four neighbors. A word's fields are of one lane then, whatever their bits, and
// elements, words and scales move in accesses of 16 bytes, if payloads begin at multiples of those;
// else words and scales move one by one. Blocks of other sizes and the last ones of chunks go
// element by element and are read twice.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "../../core/compression/integer_block_formula.h"
#include "../../core/simd/vector_scalar.h"
#include "../common/nested_grid.h"
#include "integer_payload.h"

namespace zero_ext::cuda {

// What is quantized or written: `load` gives a run of a chunk, `element` any of any block.

// The values themselves; payload p is made of chunk order[p].
template <class T>
struct IntegerValues {
  static constexpr int kMinBlocks = 3;
  static constexpr int kMax = 1024;  // chunks whose order travels with the launch

  const T* values;
  std::int64_t chunk_numel;
  bool is_ordered;
  std::int16_t order[kMax];

  ZERO_EXT_HOST_DEVICE const T* of(std::int64_t chunk) const {
    return values + (is_ordered ? order[chunk] : chunk) * chunk_numel;
  }
  ZERO_EXT_HOST_DEVICE bool aligned(std::int64_t chunk) const { return is_aligned(of(chunk)); }
  ZERO_EXT_HOST_DEVICE float element(const IntegerBlockPosition& at, int i) const {
    return core::to_float(of(at.chunk)[at.begin + i]);
  }
  template <bool kIsWide>
  ZERO_EXT_HOST_DEVICE void load(std::int64_t chunk, std::int64_t run,
                                 IntegerLanes& fragment) const {
    const T* const source = of(chunk) + run * kRegisterRun;
    IntegerTile::Fragment<T> own;
    if (kIsWide || is_aligned(source)) {
      IntegerTile::load(source, own);
    } else {
      IntegerTile::load_partial(source, 0, kRegisterRun, T{}, own);
    }
    each_lane([&](int local, int) {
      ZERO_EXT_UNROLL
      for (int k = 0; k < IntegerTile::kPerLane; ++k) {
        fragment.at[local][k] = core::to_float(own.at[local][k]);
      }
    });
  }
};

// factor * sum of payloads of `Bits` bits: of chunk p those of numbers p * step, and `stride`
// further on each, `count` of them, in that order. The compiler knows if there is only one. The
// runs of kAtOnce payloads are on their way together.
template <int Bits, bool kIsOne = false, int kAtOnce = 1>
struct IntegerSum {
  using Words = IntegerWords<Bits>;
  using RunWords = typename Words::template Fragment<std::uint32_t>;
  static constexpr int kMinBlocks = 2;  // without spilled registers
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int kLoadsAtOnce = 1;  // as two spill registers there
#else
  static constexpr int kLoadsAtOnce = kAtOnce;
#endif
  static constexpr std::uint32_t kMask = (1U << Bits) - 1;
  static constexpr int kLoads = kWarpLanes / kBlocksOfRun;  // payloads whose scales lanes have

  IntegerPayloads<const std::uint8_t> payloads;
  std::int64_t step;
  std::int64_t stride;
  std::int64_t count;
  float factor;

  ZERO_EXT_HOST_DEVICE std::int64_t terms() const { return kIsOne ? 1 : count; }
  ZERO_EXT_HOST_DEVICE bool aligned(std::int64_t chunk) const {
    if constexpr (kIsOne) return payloads.aligned(chunk * step);
    return is_aligned(payloads.bytes) && payloads.payload_bytes % std::int64_t{kAccessBytes} == 0;
  }

  template <bool kIsSymmetric>
  static ZERO_EXT_HOST_DEVICE float decode(std::uint32_t word, int shift, float scale,
                                           float lowest) {
    using Code = core::IntegerCode<Bits, kIsSymmetric>;
    const float number = std::bit_cast<float>((word >> shift & kMask) | 0x4B000000U);
    return Code::template decode<core::ScalarVector, 0>(number, scale, lowest);
  }

  ZERO_EXT_HOST_DEVICE float element(const IntegerBlockPosition& at, int i) const {
    const int own = static_cast<int>(payloads.format.words(at.length));
    const int shift = Bits * (i / own);
    const std::int64_t position = payloads.format.words(at.begin) + i % own;
    const std::int64_t by = at.block * payloads.format.scales();
    float sum = 0;
    const std::int64_t last = terms();
    ZERO_EXT_UNROLL_BY(1)
    for (std::int64_t m = 0; m < last; ++m) {
      const std::int64_t payload = at.chunk * step + m * stride;
      const std::uint32_t word = payloads.words(payload)[position];
      const std::uint32_t* const scales = payloads.scales(payload) + by;
      const auto scale = std::bit_cast<float>(scales[0]);
      const float value = payloads.format.is_symmetric
                              ? decode<true>(word, shift, scale, 0.0F)
                              : decode<false>(word, shift, scale, std::bit_cast<float>(scales[1]));
      sum = m == 0 ? value : sum + value;
    }
    return sum * factor;
  }

  template <bool kIsWide>
  ZERO_EXT_HOST_DEVICE void load(std::int64_t chunk, std::int64_t run,
                                 IntegerLanes& fragment) const {
    // Adding to it keeps every bit, also a zero's sign.
    fragment.fill(-0.0F);
    if (payloads.format.is_symmetric) {
      add_all<kIsWide, true>(chunk, run, fragment);
    } else {
      add_all<kIsWide, false>(chunk, run, fragment);
    }
    each_lane([&](int local, int) {
      ZERO_EXT_UNROLL
      for (float& value : fragment.at[local]) value = value * factor;
    });
  }

  template <bool kIsWide, bool kIsSymmetric>
  ZERO_EXT_HOST_DEVICE void add_all(std::int64_t chunk, std::int64_t run,
                                    IntegerLanes& fragment) const {
    const std::int64_t first = chunk * step;
    const std::uint32_t* words = payloads.words(first) + run * Words::kElements;
    const std::uint32_t* scales =
        payloads.scales(first) + run * kBlocksOfRun * (kIsSymmetric ? 1 : 2);
    if constexpr (kIsOne) {
      add<kIsSymmetric>(load_run<kIsWide>(words), load_scales<kIsSymmetric>(scales, kIsWide),
                        fragment);
    } else {
      add_each<kIsWide, kIsSymmetric>(words, scales, stride * (payloads.payload_bytes / 4),
                                      fragment);
    }
  }

  // The run of each payload, whose words and scales are `stride_words` words from the last one's.
  template <bool kIsWide, bool kIsSymmetric>
  ZERO_EXT_HOST_DEVICE void add_each(const std::uint32_t* words, const std::uint32_t* scales,
                                     std::int64_t stride_words, IntegerLanes& fragment) const {
    for (std::int64_t begin = 0; begin < count; begin += kLoads, scales += kLoads * stride_words) {
      const auto last = static_cast<int>(count - begin < kLoads ? count - begin : kLoads);
      const LaneScales by = scales_of<kIsSymmetric>(scales, stride_words, last);
      ZERO_EXT_UNROLL_DEVICE_LOADS_BY(kLoadsAtOnce)
      for (int m = 0; m < last; ++m, words += stride_words) {
        const RunWords own = load_run<kIsWide>(words);
        const auto source = [&](int lane) { return m * kBlocksOfRun + lane / kBlockLanes; };
        add<kIsSymmetric>(own, {shuffle(by.scale, source), shuffle(by.lowest, source)}, fragment);
      }
    }
  }

  // Of kLoads payloads or fewer: lane L has those of payload L / kBlocksOfRun and block
  // L % kBlocksOfRun of the run.
  template <bool kIsSymmetric>
  static ZERO_EXT_HOST_DEVICE LaneScales scales_of(const std::uint32_t* scales,
                                                   std::int64_t stride_words, int payloads) {
    LaneScales result;
    each_lane([&](int local, int lane) {
      const bool there = lane / kBlocksOfRun < payloads;
      const std::uint32_t* const own = scales + lane / kBlocksOfRun * stride_words +
                                       lane % kBlocksOfRun * (kIsSymmetric ? 1 : 2);
      result.scale.at[local] = there ? own[0] : 0U;
      result.lowest.at[local] = there && !kIsSymmetric ? own[1] : 0U;
    });
    return result;
  }

  template <bool kIsWide>
  static ZERO_EXT_HOST_DEVICE RunWords load_run(const std::uint32_t* source) {
    RunWords words;
    if constexpr (kIsWide) {
      Words::load(source, words);
    } else {
      Words::load_partial(source, 0, Words::kElements, 0U, words);
    }
    return words;
  }

  template <bool kIsSymmetric>
  static ZERO_EXT_HOST_DEVICE void add(const RunWords& words, const LaneScales& by,
                                       IntegerLanes& fragment) {
    each_lane([&](int local, int) {
      const auto scale = std::bit_cast<float>(by.scale.at[local]);
      const auto lowest = std::bit_cast<float>(by.lowest.at[local]);
      ZERO_EXT_UNROLL
      for (int k = 0; k < IntegerTile::kPerLane; ++k) {
        const std::uint32_t word = words.at[local][k % Words::kPerLane];
        fragment.at[local][k] +=
            decode<kIsSymmetric>(word, Bits * (k / Words::kPerLane), scale, lowest);
      }
    });
  }
};

// The extremes of values, as numbers of which the highest is looked for: the bits of magnitudes
// and, of an asymmetric code, those by which floats are ordered, upwards and downwards.
template <class Code>
struct IntegerExtremes {
  static constexpr int kKeys = Code::kIsSymmetric ? 1 : 3;

  static ZERO_EXT_HOST_DEVICE void include(float value, std::uint32_t (&keys)[kKeys]) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    highest(bits & 0x7FFFFFFFU, keys[0]);
    if constexpr (!Code::kIsSymmetric) {
      const std::uint32_t ordered = bits ^ (bits >> 31 != 0 ? 0xFFFFFFFFU : 0x80000000U);
      highest(ordered, keys[1]);
      highest(~ordered, keys[2]);
    }
  }
  static ZERO_EXT_HOST_DEVICE void highest(std::uint32_t key, std::uint32_t& so_far) {
    so_far = key > so_far ? key : so_far;
  }

  static ZERO_EXT_HOST_DEVICE core::BlockScale scale(const std::uint32_t (&keys)[kKeys]) {
    if constexpr (Code::kIsSymmetric) {
      return Code::scale_of_magnitude(keys[0]);
    } else {
      const bool is_finite = keys[0] < core::kInfinityBits<float>;
      return Code::scale_of_range(value_of(~keys[2]), value_of(keys[1]),
                                  is_finite ? 0.0F : std::numeric_limits<float>::quiet_NaN());
    }
  }
  static ZERO_EXT_HOST_DEVICE float value_of(std::uint32_t ordered) {
    return std::bit_cast<float>(ordered ^ (ordered >> 31 != 0 ? 0x80000000U : 0xFFFFFFFFU));
  }
};

// Calls run.operator()<is_wide>(chunk, run) for the runs of this warp, wide ones first, and
// block(position) for the blocks behind those of each chunk.
template <class Payloads, class IsWide, class Run, class Block>
ZERO_EXT_HOST_DEVICE void for_each_integer_run(std::int64_t warp, std::int64_t warps,
                                               const Payloads& payloads, std::int64_t chunks,
                                               const IsWide& is_wide, const Run& run,
                                               const Block& block) {
  const std::int64_t runs = payloads.runs();
  for_each_nested(warp, warps, chunks, runs, [&](std::int64_t chunk, std::int64_t number) {
    if (is_wide(chunk)) run.template operator()<true>(chunk, number);
  });
  for_each_nested(warp, warps, chunks, runs, [&](std::int64_t chunk, std::int64_t number) {
    if (!is_wide(chunk)) run.template operator()<false>(chunk, number);
  });
  for_each_nested(warp, warps, chunks, payloads.rest(),
                  [&](std::int64_t chunk, std::int64_t number) {
                    block(payloads.position(chunk, runs * kBlocksOfRun + number));
                  });
}

// Quantizes the source's elements, block by block.
template <class Source, class Code>
struct QuantizeIntegers {
  static constexpr int kMinBlocks = Source::kMinBlocks;
  static constexpr int kBits = Code::kBits;
  using Words = IntegerWords<kBits>;
  using Extremes = IntegerExtremes<Code>;

  Source source;
  IntegerPayloads<std::uint8_t> payloads;
  std::int64_t chunks;

  // Warps that find something.
  std::int64_t work() const { return chunks * (payloads.runs() + payloads.rest()); }

  ZERO_EXT_FUNCTION void operator()(std::int64_t warp, std::int64_t warps) const {
    for_each_integer_run(
        warp, warps, payloads, chunks,
        [&](std::int64_t chunk) { return source.aligned(chunk) && payloads.aligned(chunk); },
        [&]<bool kIsWide>(std::int64_t chunk, std::int64_t number) { run<kIsWide>(chunk, number); },
        [&](const IntegerBlockPosition& at) { block(at); });
  }

  template <bool kIsWide>
  ZERO_EXT_HOST_DEVICE void run(std::int64_t chunk, std::int64_t number) const {
    IntegerLanes fragment;
    source.template load<kIsWide>(chunk, number, fragment);
    Registers<std::uint32_t, Extremes::kKeys> keys;
    keys.fill(0);
    each_lane([&](int local, int) {
      ZERO_EXT_UNROLL
      for (const float& value : fragment.at[local]) Extremes::include(value, keys.at[local]);
    });
    max_of_group<kBlockLanes>(keys);
    LaneScales scales;
    typename Words::template Fragment<std::uint32_t> words;
    each_lane([&](int local, int) {
      const core::BlockScale by = Extremes::scale(keys.at[local]);
      scales.scale.at[local] = std::bit_cast<std::uint32_t>(by.scale);
      scales.lowest.at[local] = std::bit_cast<std::uint32_t>(by.lowest);
      ZERO_EXT_UNROLL
      for (int w = 0; w < Words::kPerLane; ++w) {
        std::uint32_t word = 0;
        ZERO_EXT_UNROLL
        for (int f = 0; f < Code::kFields; ++f) {
          word |= field_of(fragment.at[local][f * Words::kPerLane + w], by, f);
        }
        words.at[local][w] = by.divides() ? word : Code::kZeroWord;
      }
    });
    std::uint32_t* const target = payloads.words(chunk) + number * Words::kElements;
    if constexpr (kIsWide) {
      Words::store(target, words);
    } else {
      Words::store_partial(target, 0, Words::kElements, words);
    }
    store_scales<Code::kIsSymmetric>(payloads.scales(chunk) + number * kBlocksOfRun * Code::kScales,
                                     scales, kIsWide);
  }

  static ZERO_EXT_HOST_DEVICE std::uint32_t field_of(float value, const core::BlockScale& by,
                                                     int field) {
    const float number = Code::template encode<core::ScalarVector>(value, by);
    return (std::bit_cast<std::uint32_t>(number) & Code::kMask) << (field * Code::kBits);
  }

  ZERO_EXT_HOST_DEVICE void block(const IntegerBlockPosition& at) const {
    std::uint32_t keys[Extremes::kKeys] = {};
    for_each_strided(0, at.length, [&](int, std::int64_t i) {
      Extremes::include(source.element(at, static_cast<int>(i)), keys);
    });
    ZERO_EXT_UNROLL
    for (std::uint32_t& key : keys) key = max_of_warp(key);
    const core::BlockScale by = Extremes::scale(keys);
    const auto count = static_cast<int>(payloads.format.words(at.length));
    std::uint32_t* const target = payloads.words(at.chunk) + payloads.format.words(at.begin);
    for_each_strided(0, count, [&](int, std::int64_t w) {
      std::uint32_t word = 0;
      ZERO_EXT_UNROLL_BY(1)
      for (int f = 0; f < Code::kFields; ++f) {
        const int i = static_cast<int>(w) + f * count;
        word |= field_of(source.element(at, i < at.length ? i : 0), by, f);
      }
      target[w] = by.divides() ? word : Code::kZeroWord;
    });
    each_lane([&](int, int lane) {
      std::uint32_t* const scales = payloads.scales(at.chunk) + at.block * Code::kScales;
      if (lane < Code::kScales) {
        scales[lane] = std::bit_cast<std::uint32_t>(lane == 0 ? by.scale : by.lowest);
      }
    });
  }
};

// out = what the sum gives [+ out], chunk after chunk.
template <class Sum, class T>
struct WriteIntegers {
  Sum sum;
  std::int64_t chunks;
  bool accumulate;
  T* out;

  // Warps that find something.
  std::int64_t work() const { return chunks * (sum.payloads.runs() + sum.payloads.rest()); }

  ZERO_EXT_FUNCTION void operator()(std::int64_t warp, std::int64_t warps) const {
    for_each_integer_run(
        warp, warps, sum.payloads, chunks,
        [&](std::int64_t chunk) { return sum.aligned(chunk) && is_aligned(of(chunk)); },
        [&]<bool kIsWide>(std::int64_t chunk, std::int64_t number) { run<kIsWide>(chunk, number); },
        [&](const IntegerBlockPosition& at) {
          T* const target = of(at.chunk) + at.begin;
          for_each_strided(0, at.length, [&](int, std::int64_t i) {
            finish(sum.element(at, static_cast<int>(i)), target[i]);
          });
        });
  }

  ZERO_EXT_HOST_DEVICE T* of(std::int64_t chunk) const {
    return out + chunk * sum.payloads.chunk_numel;
  }

  template <bool kIsWide>
  ZERO_EXT_HOST_DEVICE void run(std::int64_t chunk, std::int64_t number) const {
    IntegerLanes fragment;
    sum.template load<kIsWide>(chunk, number, fragment);
    T* const target = of(chunk) + number * kRegisterRun;
    const bool wide = kIsWide || is_aligned(target);
    IntegerTile::Fragment<T> result;
    if (accumulate && wide) IntegerTile::load(target, result);
    if (accumulate && !wide) IntegerTile::load_partial(target, 0, kRegisterRun, T{}, result);
    each_lane([&](int local, int) {
      ZERO_EXT_UNROLL
      for (int k = 0; k < IntegerTile::kPerLane; ++k)
        finish(fragment.at[local][k], result.at[local][k]);
    });
    if (wide) return IntegerTile::store(target, result);
    IntegerTile::store_partial(target, 0, kRegisterRun, result);
  }

  ZERO_EXT_HOST_DEVICE void finish(float value, T& result) const {
    result = core::from_float<T>(accumulate ? value + core::to_float(result) : value);
  }
};

}  // namespace zero_ext::cuda
