// Sixteen-lane vector on AVX-512 F, BW, DQ and VL. Included only inside that target's region.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../base/numeric_types.h"

namespace zero_ext::core {

struct Avx512Vector {
  using Float = __m512;
  using Double = __m512d;
  using Bits = __m512i;
  static constexpr int width = 16;
  static constexpr int halves = 2;

  static Float load(const float* source) { return _mm512_loadu_ps(source); }
  static Float load(const BFloat16* source) {
    const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(packed), 16));
  }
  static Float load(const Float16* source) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
  }

  static void store(float* target, Float value) { _mm512_storeu_ps(target, value); }
  static void store(BFloat16* target, Float value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), round(value));
  }
  static void store(Float16* target, Float value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target),
                        _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }

  // Stores past the caches, to a target aligned to the bytes written; fence() orders them.
  static void stream(float* target, Float value) { _mm512_stream_ps(target, value); }
  static void stream(BFloat16* target, Float value) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target), round(value));
  }
  static void stream(Float16* target, Float value) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target),
                        _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }
  // Whole vectors, both aligned.
  static void stream_bytes(void* target, const void* source, std::size_t bytes) {
    auto* to = static_cast<__m512i*>(target);
    const auto* from = static_cast<const __m512i*>(source);
    for (std::size_t i = 0; i < bytes / sizeof(__m512i); ++i) {
      _mm512_stream_si512(to + i, _mm512_load_si512(from + i));
    }
  }
  static void fence() { _mm_sfence(); }

  // Float32 to bfloat16, nearest even. Integer arithmetic, because the bfloat16 instructions flush
  // subnormals to zero.
  static __m256i round(Float value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __mmask16 unordered = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i halves = _mm512_mask_mov_epi32(rounded, unordered, _mm512_set1_epi32(0x7FC0));
    return _mm512_cvtepi32_epi16(halves);
  }

  static Float set(float value) { return _mm512_set1_ps(value); }
  static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float sqrt(Float a) { return _mm512_sqrt_ps(a); }
  static Float abs(Float a) { return _mm512_abs_ps(a); }
  static Float floor(Float a) { return _mm512_floor_ps(a); }
  static Float min(Float a, Float b) { return _mm512_min_ps(a, b); }
  static Float max(Float a, Float b) { return _mm512_max_ps(a, b); }
  // The last argument: the higher magnitude, without a sign.
  static Float max_magnitude(Float a, Float b) { return _mm512_range_ps(a, b, 0x0B); }
  static Float copy_sign(Float magnitude, Float sign) {
    return _mm512_or_ps(magnitude, _mm512_and_ps(sign, _mm512_set1_ps(-0.0F)));
  }
  static Float if_at_least(Float a, Float b, Float then, Float otherwise) {
    return _mm512_mask_mov_ps(otherwise, _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), then);
  }
  static Bits add_if_at_least(Bits sum, std::uint32_t term, Float a, Float b) {
    return _mm512_mask_add_epi32(sum, _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), sum,
                                 set_bits<float>(term));
  }
  static std::uint32_t lanes_at_least(Float a, Float b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ);
  }
  static Float add_signed(Float sum, std::uint32_t chosen, float term) {
    const __m512 difference = _mm512_sub_ps(sum, set(term));
    return _mm512_mask_add_ps(difference, static_cast<__mmask16>(chosen), sum, set(term));
  }
  static __m512i chosen_of(std::uint32_t chosen, float then, float otherwise) {
    return _mm512_castps_si512(
        _mm512_mask_blend_ps(static_cast<__mmask16>(chosen), set(otherwise), set(then)));
  }
  template <class T>
  static __m256i chosen_of(std::uint32_t chosen, T then, T otherwise) {
    return _mm256_mask_blend_epi16(static_cast<__mmask16>(chosen),
                                   _mm256_set1_epi16(static_cast<short>(otherwise.bits)),
                                   _mm256_set1_epi16(static_cast<short>(then.bits)));
  }
  static void store_chosen(float* target, std::uint32_t chosen, float then, float otherwise) {
    _mm512_storeu_si512(target, chosen_of(chosen, then, otherwise));
  }
  template <class T>
  static void store_chosen(T* target, std::uint32_t chosen, T then, T otherwise) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), chosen_of(chosen, then, otherwise));
  }
  static void stream_chosen(float* target, std::uint32_t chosen, float then, float otherwise) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), chosen_of(chosen, then, otherwise));
  }
  template <class T>
  static void stream_chosen(T* target, std::uint32_t chosen, T then, T otherwise) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target), chosen_of(chosen, then, otherwise));
  }
  static std::uint32_t load_lanes(const std::uint32_t* words, std::int64_t i) {
    return (words[i / 32] >> (i % 32)) & 0xFFFFU;
  }
  static Bits load_words(const void* source) { return _mm512_loadu_si512(source); }
  static void store_words(std::uint32_t* target, Bits value) { _mm512_storeu_si512(target, value); }
  static void stream_words(std::uint32_t* target, Bits value) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), value);
  }
  // The last argument of a ternary operation is its truth table: (a & b) | c, then a | (b & c);
  // below, a ^ (b | c) and a ^ (~b | c).
  template <int Shift, int BitOffset>
  static Float get_field(Bits words, std::uint32_t mask) {
    const std::uint32_t base = 0x4B000000U - (static_cast<std::uint32_t>(BitOffset) << 23);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(shifted_right<Shift>(words),
                                                         set_bits<float>(mask << BitOffset),
                                                         set_bits<float>(base), 0xEA));
  }
  template <int Shift>
  static Bits shifted_right(Bits words) {
    if constexpr (Shift == 0) return words;
    return _mm512_srli_epi32(words, Shift);
  }
  template <int Shift>
  static Bits shifted_left(Bits words) {
    if constexpr (Shift == 0) return words;
    return _mm512_slli_epi32(words, Shift);
  }
  template <int First, int Second>
  static Bits xor_shifted(Bits words, Float a, Float b) {
    return _mm512_ternarylogic_epi32(words, shifted_left<First>(_mm512_castps_si512(a)),
                                     shifted_left<Second>(_mm512_castps_si512(b)), 0x96);
  }
  // Entry of a table of 16 by the field of four bits that starts at bit `Shift`.
  template <int Shift>
  static Float lookup_field(Float table, Bits words) {
    return _mm512_permutexvar_ps(shifted_right<Shift>(words), table);
  }
  static Float lookup(const float (&table)[8], Bits index) {
    return _mm512_permutexvar_ps(index, _mm512_broadcast_f32x8(_mm256_loadu_ps(table)));
  }
  static Float by_exponent(const float (&table)[8], Float a) {
    return lookup(table, _mm512_srli_epi32(_mm512_castps_si512(a), 23));
  }
  static Float fraction(Float a) {
    const __m512i bits = _mm512_and_si512(_mm512_castps_si512(a), set_bits<float>(0x7FFFFFU));
    const __m512i significand = _mm512_or_si512(bits, set_bits<float>(0x3F800000U));
    return _mm512_sub_ps(_mm512_castsi512_ps(significand), _mm512_set1_ps(1.0F));
  }

  static Bits magnitude_keys(const float* source) {
    const __m512i bits = _mm512_loadu_si512(source);
    return _mm512_xor_si512(_mm512_rol_epi32(bits, 1), set_bits<float>(1));
  }
  static Float load_bytes(const std::uint8_t* source) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(packed));
  }
  static void store_bytes(std::uint8_t* target, Float value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target),
                     _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(value)));
  }

  template <int Half>
  static Double widen(Float value) {
    return _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, Half));
  }
  static Double set(double value) { return _mm512_set1_pd(value); }
  static Double add(Double a, Double b) { return _mm512_add_pd(a, b); }
  static Double sub(Double a, Double b) { return _mm512_sub_pd(a, b); }
  static Double multiply_add(Double a, Double b, Double c) { return _mm512_fmadd_pd(a, b, c); }
  static Double multiply_subtract(Double a, Double b, Double c) { return _mm512_fmsub_pd(a, b, c); }
  static double sum(Double value) { return _mm512_reduce_add_pd(value); }

  template <class T>
  static constexpr int lanes = 64 / sizeof(T);
  template <class T>
  static Bits set_bits(std::uint32_t value) {
    if constexpr (sizeof(T) == 2) return _mm512_set1_epi16(static_cast<short>(value));
    return _mm512_set1_epi32(static_cast<int>(value));
  }
  template <class T>
  static Bits magnitudes(const T* source) {
    const __m512i bits = _mm512_loadu_si512(source);
    return _mm512_and_si512(bits, set_bits<T>(0x7FFFFFFFU >> (32 - 8 * sizeof(T))));
  }
  template <class T>
  static Bits ordered(const T* source) {
    const __m512i bits = _mm512_loadu_si512(source);
    return _mm512_ternarylogic_epi32(bits, _mm512_srai_epi16(bits, 15), set_bits<T>(0x8000), 0x1E);
  }
  static Bits ordered_of(Float value) {
    const __m512i bits = _mm512_castps_si512(value);
    return _mm512_ternarylogic_epi32(bits, _mm512_srai_epi32(bits, 31),
                                     set_bits<float>(0x80000000U), 0x1E);
  }
  static Bits unordered(Bits ordered) {
    const __m512i positive = _mm512_srai_epi32(ordered, 31);
    return _mm512_ternarylogic_epi32(ordered, positive, set_bits<float>(0x80000000U), 0x4B);
  }
  static Bits low_halves(Bits value) { return _mm512_slli_epi32(value, 16); }
  static Bits high_halves(Bits value) {
    return _mm512_and_si512(value, set_bits<float>(0xFFFF0000U));
  }
  template <class T>
  static Float value_of_upper(Bits bits) {
    if constexpr (std::is_same_v<T, Float16>) {
      const __m512i halves = _mm512_srli_epi32(bits, 16);
      return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(halves));
    }
    return _mm512_castsi512_ps(sizeof(T) == 2 ? high_halves(bits) : bits);
  }
  template <class Operation>
  static Bits across(const Bits* each, const Operation& both) {
    __m512i quarters[4];
    for (int i = 0; i < 4; ++i) {
      const __m512i* const own = each + 4 * i;
      const __m512i first =
          both(_mm512_unpacklo_epi64(own[0], own[1]), _mm512_unpackhi_epi64(own[0], own[1]));
      const __m512i second =
          both(_mm512_unpacklo_epi64(own[2], own[3]), _mm512_unpackhi_epi64(own[2], own[3]));
      quarters[i] = fold_pairs<0x88, 0xDD>(first, second, both);
    }
    return across_quarters<0x88, 0xDD>(across_quarters<0x44, 0xEE>(quarters[0], quarters[1], both),
                                       across_quarters<0x44, 0xEE>(quarters[2], quarters[3], both),
                                       both);
  }
  template <int Low, int High, class Operation>
  static Bits fold_pairs(Bits a, Bits b, const Operation& both) {
    const __m512 first = _mm512_castsi512_ps(a);
    const __m512 second = _mm512_castsi512_ps(b);
    return both(_mm512_castps_si512(_mm512_shuffle_ps(first, second, Low)),
                _mm512_castps_si512(_mm512_shuffle_ps(first, second, High)));
  }
  template <int Low, int High, class Operation>
  static Bits across_quarters(Bits a, Bits b, const Operation& both) {
    return both(_mm512_shuffle_i32x4(a, b, Low), _mm512_shuffle_i32x4(a, b, High));
  }
  static Bits magnitudes_of(Float value) { return _mm512_castps_si512(abs(value)); }
  template <class T>
  static Bits decrement(Bits value) {
    if constexpr (sizeof(T) == 2) return _mm512_sub_epi16(value, set_bits<T>(1));
    return _mm512_sub_epi32(value, set_bits<T>(1));
  }
  template <class T>
  static Bits max(Bits a, Bits b) {
    if constexpr (sizeof(T) == 2) return _mm512_max_epu16(a, b);
    return _mm512_max_epu32(a, b);
  }
  template <class T>
  static Bits min(Bits a, Bits b) {
    if constexpr (sizeof(T) == 2) return _mm512_min_epu16(a, b);
    return _mm512_min_epu32(a, b);
  }
  static std::uint16_t highest_of_eight(__m128i value) {
    const __m128i ones = _mm_set1_epi32(-1);
    const __m128i lowest = _mm_minpos_epu16(_mm_xor_si128(value, ones));
    return static_cast<std::uint16_t>(~_mm_extract_epi16(lowest, 0));
  }
  static float lowest(Float value) { return _mm512_reduce_min_ps(value); }
  static float highest(Float value) { return _mm512_reduce_max_ps(value); }
  template <class T>
  static UnsignedOf<T> highest(Bits value) {
    if constexpr (sizeof(T) == 4) return _mm512_reduce_max_epu32(value);
    const __m256i half =
        _mm256_max_epu16(_mm512_castsi512_si256(value), _mm512_extracti64x4_epi64(value, 1));
    return highest_of_eight(
        _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
  }
  template <class T>
  static UnsignedOf<T> lowest(Bits value) {
    return static_cast<UnsignedOf<T>>(~highest<T>(_mm512_xor_si512(value, _mm512_set1_epi32(-1))));
  }
};

}  // namespace zero_ext::core
