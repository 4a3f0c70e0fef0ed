// Eight-lane vector on AVX2, FMA and F16C. Included only inside that target's region.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../base/numeric_types.h"

namespace zero_ext::core {

struct Avx2Vector {
  using Float = __m256;
  using Double = __m256d;
  using Bits = __m256i;
  static constexpr int width = 8;
  static constexpr int halves = 2;

  static Float load(const float* source) { return _mm256_loadu_ps(source); }
  static Float load(const BFloat16* source) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(packed), 16));
  }
  static Float load(const Float16* source) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
  }

  static void store(float* target, Float value) { _mm256_storeu_ps(target, value); }
  static void store(BFloat16* target, Float value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), round(value));
  }
  static void store(Float16* target, Float value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target),
                     _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }

  // Stores past the caches, to a target aligned to the bytes written; fence() orders them.
  static void stream(float* target, Float value) { _mm256_stream_ps(target, value); }
  static void stream(BFloat16* target, Float value) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(target), round(value));
  }
  static void stream(Float16* target, Float value) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(target),
                     _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }
  // Whole vectors, both aligned.
  static void stream_bytes(void* target, const void* source, std::size_t bytes) {
    auto* to = static_cast<__m256i*>(target);
    const auto* from = static_cast<const __m256i*>(source);
    for (std::size_t i = 0; i < bytes / sizeof(__m256i); ++i) {
      _mm256_stream_si256(to + i, _mm256_load_si256(from + i));
    }
  }
  static void fence() { _mm_sfence(); }

  // Float32 to bfloat16, nearest even. Integer arithmetic, because the bfloat16 instructions flush
  // subnormals to zero.
  static __m128i round(Float value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i unordered = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i halves = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), unordered);
    return _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  }

  static Float set(float value) { return _mm256_set1_ps(value); }
  static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm256_div_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float sqrt(Float a) { return _mm256_sqrt_ps(a); }
  static Float abs(Float a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), a); }
  static Float floor(Float a) { return _mm256_floor_ps(a); }
  static Float min(Float a, Float b) { return _mm256_min_ps(a, b); }
  static Float max(Float a, Float b) { return _mm256_max_ps(a, b); }
  static Float max_magnitude(Float a, Float b) { return max(abs(a), abs(b)); }
  static Float copy_sign(Float magnitude, Float sign) {
    return _mm256_or_ps(magnitude, _mm256_and_ps(sign, _mm256_set1_ps(-0.0F)));
  }
  static Float if_at_least(Float a, Float b, Float then, Float otherwise) {
    return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(a, b, _CMP_GE_OQ));
  }
  static Bits add_if_at_least(Bits sum, std::uint32_t term, Float a, Float b) {
    const __m256i reached = _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_GE_OQ));
    return _mm256_add_epi32(sum, _mm256_and_si256(reached, set_bits<float>(term)));
  }
  static std::uint32_t lanes_at_least(Float a, Float b) {
    return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)));
  }
  static __m256i lane_mask(std::uint32_t chosen) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i own = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(chosen)), bit);
    return _mm256_cmpeq_epi32(own, bit);
  }
  static Float add_signed(Float sum, std::uint32_t chosen, float term) {
    const __m256 sign = _mm256_andnot_ps(_mm256_castsi256_ps(lane_mask(chosen)), set(-0.0F));
    return _mm256_add_ps(sum, _mm256_xor_ps(set(term), sign));
  }
  static __m256i chosen_of(std::uint32_t chosen, float then, float otherwise) {
    return _mm256_castps_si256(
        _mm256_blendv_ps(set(otherwise), set(then), _mm256_castsi256_ps(lane_mask(chosen))));
  }
  template <class T>
  static __m128i chosen_of(std::uint32_t chosen, T then, T otherwise) {
    const __m128i bit = _mm_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128);
    const __m128i own = _mm_and_si128(_mm_set1_epi16(static_cast<short>(chosen)), bit);
    return _mm_blendv_epi8(_mm_set1_epi16(static_cast<short>(otherwise.bits)),
                           _mm_set1_epi16(static_cast<short>(then.bits)),
                           _mm_cmpeq_epi16(own, bit));
  }
  static void store_chosen(float* target, std::uint32_t chosen, float then, float otherwise) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), chosen_of(chosen, then, otherwise));
  }
  template <class T>
  static void store_chosen(T* target, std::uint32_t chosen, T then, T otherwise) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), chosen_of(chosen, then, otherwise));
  }
  static void stream_chosen(float* target, std::uint32_t chosen, float then, float otherwise) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target), chosen_of(chosen, then, otherwise));
  }
  template <class T>
  static void stream_chosen(T* target, std::uint32_t chosen, T then, T otherwise) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(target), chosen_of(chosen, then, otherwise));
  }
  static std::uint32_t load_lanes(const std::uint32_t* words, std::int64_t i) {
    return reinterpret_cast<const std::uint8_t*>(words)[i / 8];
  }
  static Bits load_words(const void* source) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(source));
  }
  static void store_words(std::uint32_t* target, Bits value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), value);
  }
  static void stream_words(std::uint32_t* target, Bits value) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target), value);
  }
  template <int Shift, int BitOffset>
  static Float get_field(Bits words, std::uint32_t mask) {
    const __m256i field =
        _mm256_and_si256(_mm256_srli_epi32(words, Shift), set_bits<float>(mask << BitOffset));
    const std::uint32_t base = 0x4B000000U - (static_cast<std::uint32_t>(BitOffset) << 23);
    return _mm256_castsi256_ps(_mm256_or_si256(field, set_bits<float>(base)));
  }
  template <int First, int Second>
  static Bits xor_shifted(Bits words, Float a, Float b) {
    const __m256i first = _mm256_slli_epi32(_mm256_castps_si256(a), First);
    const __m256i second = _mm256_slli_epi32(_mm256_castps_si256(b), Second);
    return _mm256_xor_si256(_mm256_xor_si256(words, first), second);
  }
  static Float lookup(const float (&table)[8], Bits index) {
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), index);
  }
  static Float by_exponent(const float (&table)[8], Float a) {
    return lookup(table, _mm256_srli_epi32(_mm256_castps_si256(a), 23));
  }
  static Float fraction(Float a) {
    const __m256i bits = _mm256_and_si256(_mm256_castps_si256(a), set_bits<float>(0x7FFFFFU));
    const __m256i significand = _mm256_or_si256(bits, set_bits<float>(0x3F800000U));
    return _mm256_sub_ps(_mm256_castsi256_ps(significand), _mm256_set1_ps(1.0F));
  }

  static Bits magnitude_keys(const float* source) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    const __m256i rotated =
        _mm256_or_si256(_mm256_slli_epi32(bits, 1), _mm256_srli_epi32(bits, 31));
    return _mm256_xor_si256(rotated, set_bits<float>(1));
  }
  static Float load_bytes(const std::uint8_t* source) {
    const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(source));
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(packed));
  }
  static void store_bytes(std::uint8_t* target, Float value) {
    const __m256i wide = _mm256_cvttps_epi32(value);
    const __m128i halves =
        _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(target), _mm_packus_epi16(halves, halves));
  }

  template <int Half>
  static Double widen(Float value) {
    return _mm256_cvtps_pd(_mm256_extractf128_ps(value, Half));
  }
  static Double set(double value) { return _mm256_set1_pd(value); }
  static Double add(Double a, Double b) { return _mm256_add_pd(a, b); }
  static Double sub(Double a, Double b) { return _mm256_sub_pd(a, b); }
  static Double multiply_add(Double a, Double b, Double c) { return _mm256_fmadd_pd(a, b, c); }
  static Double multiply_subtract(Double a, Double b, Double c) { return _mm256_fmsub_pd(a, b, c); }
  static double sum(Double value) {
    alignas(32) double lanes[4];
    _mm256_store_pd(lanes, value);
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  }

  template <class T>
  static constexpr int lanes = 32 / sizeof(T);
  template <class T>
  static Bits set_bits(std::uint32_t value) {
    if constexpr (sizeof(T) == 2) return _mm256_set1_epi16(static_cast<short>(value));
    return _mm256_set1_epi32(static_cast<int>(value));
  }
  template <class T>
  static Bits magnitudes(const T* source) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    return _mm256_and_si256(bits, set_bits<T>(0x7FFFFFFFU >> (32 - 8 * sizeof(T))));
  }
  template <class T>
  static Bits ordered(const T* source) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    const __m256i flipped = _mm256_or_si256(_mm256_srai_epi16(bits, 15), set_bits<T>(0x8000));
    return _mm256_xor_si256(bits, flipped);
  }
  static Bits ordered_of(Float value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i flipped =
        _mm256_or_si256(_mm256_srai_epi32(bits, 31), set_bits<float>(0x80000000U));
    return _mm256_xor_si256(bits, flipped);
  }
  static Bits unordered(Bits ordered) {
    const __m256i positive = _mm256_srai_epi32(ordered, 31);
    const __m256i flipped = _mm256_andnot_si256(positive, set_bits<float>(0x7FFFFFFFU));
    return _mm256_xor_si256(ordered, _mm256_or_si256(flipped, set_bits<float>(0x80000000U)));
  }
  static Bits low_halves(Bits value) { return _mm256_slli_epi32(value, 16); }
  static Bits high_halves(Bits value) {
    return _mm256_and_si256(value, set_bits<float>(0xFFFF0000U));
  }
  template <class T>
  static Float value_of_upper(Bits bits) {
    if constexpr (std::is_same_v<T, Float16>) {
      const __m256i halves = _mm256_srli_epi32(bits, 16);
      return _mm256_cvtph_ps(
          _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
    }
    return _mm256_castsi256_ps(sizeof(T) == 2 ? high_halves(bits) : bits);
  }
  template <class Operation>
  static Bits across(const Bits* each, const Operation& both) {
    __m256i halves[2];
    for (int i = 0; i < 2; ++i) {
      const __m256i* const own = each + 4 * i;
      const __m256 first = _mm256_castsi256_ps(
          both(_mm256_unpacklo_epi64(own[0], own[1]), _mm256_unpackhi_epi64(own[0], own[1])));
      const __m256 second = _mm256_castsi256_ps(
          both(_mm256_unpacklo_epi64(own[2], own[3]), _mm256_unpackhi_epi64(own[2], own[3])));
      halves[i] = both(_mm256_castps_si256(_mm256_shuffle_ps(first, second, 0x88)),
                       _mm256_castps_si256(_mm256_shuffle_ps(first, second, 0xDD)));
    }
    return both(_mm256_permute2x128_si256(halves[0], halves[1], 0x20),
                _mm256_permute2x128_si256(halves[0], halves[1], 0x31));
  }
  static Bits magnitudes_of(Float value) { return _mm256_castps_si256(abs(value)); }
  template <class T>
  static Bits decrement(Bits value) {
    if constexpr (sizeof(T) == 2) return _mm256_sub_epi16(value, set_bits<T>(1));
    return _mm256_sub_epi32(value, set_bits<T>(1));
  }
  template <class T>
  static Bits max(Bits a, Bits b) {
    if constexpr (sizeof(T) == 2) return _mm256_max_epu16(a, b);
    return _mm256_max_epu32(a, b);
  }
  template <class T>
  static Bits min(Bits a, Bits b) {
    if constexpr (sizeof(T) == 2) return _mm256_min_epu16(a, b);
    return _mm256_min_epu32(a, b);
  }
  static float lowest(Float value) {
    __m128 half = _mm_min_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    half = _mm_min_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_min_ss(half, _mm_movehdup_ps(half)));
  }
  static float highest(Float value) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
  }
  template <class T>
  static UnsignedOf<T> highest(Bits value) {
    UnsignedOf<T> each[lanes<T>];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(each), value);
    return *std::max_element(each, each + lanes<T>);
  }
  template <class T>
  static UnsignedOf<T> lowest(Bits value) {
    return static_cast<UnsignedOf<T>>(~highest<T>(_mm256_xor_si256(value, _mm256_set1_epi32(-1))));
  }
};

}  // namespace zero_ext::core
