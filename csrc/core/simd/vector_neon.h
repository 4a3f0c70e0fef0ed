// Four-lane vector on NEON, which every 64-bit Arm processor has.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../base/numeric_types.h"

namespace zero_ext::core {

struct NeonVector {
  using Float = float32x4_t;
  using Double = float64x2_t;
  using Bits = uint32x4_t;
  static constexpr int width = 4;
  static constexpr int halves = 2;

  // Any 16 bytes: copied, because integers may not be read through pointers to floats.
  static Bits load_words(const void* source) {
    Bits words;
    std::memcpy(&words, source, sizeof words);
    return words;
  }
  // The 16 bits of four elements of a half precision type.
  template <class T>
  static uint16x4_t load_halves(const T* source) {
    uint16x4_t packed;
    std::memcpy(&packed, source, sizeof packed);
    return packed;
  }

  static Float load(const float* source) { return vld1q_f32(source); }
  static Float load(const BFloat16* source) {
    return vreinterpretq_f32_u32(vshll_n_u16(load_halves(source), 16));
  }
  static Float load(const Float16* source) {
    return vcvt_f32_f16(vreinterpret_f16_u16(load_halves(source)));
  }

  static void store(float* target, Float value) { vst1q_f32(target, value); }
  static void store(BFloat16* target, Float value) { store_halves(target, round(value)); }
  static void store(Float16* target, Float value) {
    store_halves(target, vreinterpret_u16_f16(vcvt_f16_f32(value)));
  }
  template <class T>
  static void store_halves(T* target, uint16x4_t packed) {
    std::memcpy(target, &packed, sizeof packed);
  }

  // Ordinary stores: GCC has no function for those of Arm that go past the caches.
  template <class T>
  static void stream(T* target, Float value) {
    store(target, value);
  }
  static void stream_bytes(void* target, const void* source, std::size_t bytes) {
    std::memcpy(target, source, bytes);
  }
  static void fence() {}

  // Float32 to bfloat16, nearest even. Integer arithmetic, because not every processor has the
  // bfloat16 instructions.
  static uint16x4_t round(Float value) {
    const uint32x4_t bits = vreinterpretq_u32_f32(value);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), set_bits<float>(1));
    const uint32x4_t bias = vaddq_u32(odd, set_bits<float>(0x7FFF));
    const uint16x4_t rounded = vshrn_n_u32(vaddq_u32(bits, bias), 16);
    return vbsl_u16(vmovn_u32(vceqq_f32(value, value)), rounded, vdup_n_u16(0x7FC0));
  }

  static Float set(float value) { return vdupq_n_f32(value); }
  static Float add(Float a, Float b) { return vaddq_f32(a, b); }
  static Float sub(Float a, Float b) { return vsubq_f32(a, b); }
  static Float mul(Float a, Float b) { return vmulq_f32(a, b); }
  static Float div(Float a, Float b) { return vdivq_f32(a, b); }
  static Float fma(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
  static Float sqrt(Float a) { return vsqrtq_f32(a); }
  static Float abs(Float a) { return vabsq_f32(a); }
  static Float floor(Float a) { return vrndmq_f32(a); }
  // By comparison, so that the second is taken where either is NaN. vminq would give NaN.
  static Float min(Float a, Float b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
  static Float max(Float a, Float b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
  static Float max_magnitude(Float a, Float b) { return max(abs(a), abs(b)); }
  static Float copy_sign(Float magnitude, Float sign) {
    return vbslq_f32(set_bits<float>(0x80000000U), sign, magnitude);
  }
  static Float if_at_least(Float a, Float b, Float then, Float otherwise) {
    return vbslq_f32(vcgeq_f32(a, b), then, otherwise);
  }
  static Bits add_if_at_least(Bits sum, std::uint32_t term, Float a, Float b) {
    return vaddq_u32(sum, vandq_u32(vcgeq_f32(a, b), set_bits<float>(term)));
  }
  static Bits bit_of_each_lane() {
    constexpr std::uint32_t bits[width] = {1, 2, 4, 8};
    return vld1q_u32(bits);
  }
  static std::uint32_t lanes_at_least(Float a, Float b) {
    return vaddvq_u32(vandq_u32(vcgeq_f32(a, b), bit_of_each_lane()));
  }
  static Bits lane_mask(std::uint32_t chosen) {
    return vtstq_u32(set_bits<float>(chosen), bit_of_each_lane());
  }
  static Float add_signed(Float sum, std::uint32_t chosen, float term) {
    const uint32x4_t sign = vbicq_u32(set_bits<float>(0x80000000U), lane_mask(chosen));
    const uint32x4_t bits = veorq_u32(vreinterpretq_u32_f32(set(term)), sign);
    return vaddq_f32(sum, vreinterpretq_f32_u32(bits));
  }
  static void store_chosen(float* target, std::uint32_t chosen, float then, float otherwise) {
    store(target, vbslq_f32(lane_mask(chosen), set(then), set(otherwise)));
  }
  template <class T>
  static void store_chosen(T* target, std::uint32_t chosen, T then, T otherwise) {
    store_halves(target, vbsl_u16(vmovn_u32(lane_mask(chosen)), vdup_n_u16(then.bits),
                                  vdup_n_u16(otherwise.bits)));
  }
  template <class T>
  static void stream_chosen(T* target, std::uint32_t chosen, T then, T otherwise) {
    store_chosen(target, chosen, then, otherwise);
  }
  static std::uint32_t load_lanes(const std::uint32_t* words, std::int64_t i) {
    return (words[i / 32] >> (i % 32)) & 0xFU;
  }
  static void store_words(std::uint32_t* target, Bits value) { vst1q_u32(target, value); }
  static void stream_words(std::uint32_t* target, Bits value) { store_words(target, value); }

  // The instruction shifts by at least one.
  template <int Shift>
  static Bits shifted_right(Bits words) {
    if constexpr (Shift == 0) {
      return words;
    } else {
      return vshrq_n_u32(words, Shift);
    }
  }
  template <int Shift, int BitOffset>
  static Float get_field(Bits words, std::uint32_t mask) {
    const uint32x4_t field =
        vandq_u32(shifted_right<Shift>(words), set_bits<float>(mask << BitOffset));
    const std::uint32_t base = 0x4B000000U - (static_cast<std::uint32_t>(BitOffset) << 23);
    return vreinterpretq_f32_u32(vorrq_u32(field, set_bits<float>(base)));
  }
  template <int First, int Second>
  static Bits xor_shifted(Bits words, Float a, Float b) {
    const uint32x4_t first = vshlq_n_u32(vreinterpretq_u32_f32(a), First);
    const uint32x4_t second = vshlq_n_u32(vreinterpretq_u32_f32(b), Second);
    return veorq_u32(veorq_u32(words, first), second);
  }
  // Byte by byte: the four indices of an entry's bytes are made of the entry's.
  static Float lookup(const float (&table)[8], Bits index) {
    const uint8x16x2_t bytes = {
        {vreinterpretq_u8_f32(vld1q_f32(table)), vreinterpretq_u8_f32(vld1q_f32(table + width))}};
    const uint32x4_t entry = vandq_u32(index, set_bits<float>(7));
    const uint32x4_t each =
        vmlaq_u32(set_bits<float>(0x03020100U), entry, set_bits<float>(0x04040404U));
    return vreinterpretq_f32_u8(vqtbl2q_u8(bytes, vreinterpretq_u8_u32(each)));
  }
  static Float by_exponent(const float (&table)[8], Float a) {
    return lookup(table, vshrq_n_u32(vreinterpretq_u32_f32(a), 23));
  }
  static Float fraction(Float a) {
    const uint32x4_t bits = vandq_u32(vreinterpretq_u32_f32(a), set_bits<float>(0x7FFFFFU));
    const uint32x4_t significand = vorrq_u32(bits, set_bits<float>(0x3F800000U));
    return vsubq_f32(vreinterpretq_f32_u32(significand), set(1.0F));
  }

  static Bits magnitude_keys(const float* source) {
    const uint32x4_t bits = load_words(source);
    const uint32x4_t rotated = vsriq_n_u32(vshlq_n_u32(bits, 1), bits, 31);
    return veorq_u32(rotated, set_bits<float>(1));
  }
  static Float load_bytes(const std::uint8_t* source) {
    std::uint32_t packed;
    std::memcpy(&packed, source, sizeof packed);
    const uint16x8_t wide = vmovl_u8(vcreate_u8(packed));
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
  }
  static void store_bytes(std::uint8_t* target, Float value) {
    const uint16x4_t narrow = vmovn_u32(vcvtq_u32_f32(value));
    const uint8x8_t bytes = vmovn_u16(vcombine_u16(narrow, narrow));
    const std::uint32_t packed = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
    std::memcpy(target, &packed, sizeof packed);
  }

  template <int Half>
  static Double widen(Float value) {
    if constexpr (Half == 0) {
      return vcvt_f64_f32(vget_low_f32(value));
    } else {
      return vcvt_high_f64_f32(value);
    }
  }
  static Double set(double value) { return vdupq_n_f64(value); }
  static Double add(Double a, Double b) { return vaddq_f64(a, b); }
  static Double sub(Double a, Double b) { return vsubq_f64(a, b); }
  static Double multiply_add(Double a, Double b, Double c) { return vfmaq_f64(c, a, b); }
  static Double multiply_subtract(Double a, Double b, Double c) {
    return vfmaq_f64(vnegq_f64(c), a, b);
  }
  static double sum(Double value) { return vaddvq_f64(value); }

  template <class T>
  static constexpr int lanes = 16 / sizeof(T);
  template <class T>
  static Bits set_bits(std::uint32_t value) {
    if constexpr (sizeof(T) == 2) {
      return vreinterpretq_u32_u16(vdupq_n_u16(static_cast<std::uint16_t>(value)));
    } else {
      return vdupq_n_u32(value);
    }
  }
  template <class T>
  static Bits magnitudes(const T* source) {
    return vandq_u32(load_words(source), set_bits<T>(0x7FFFFFFFU >> (32 - 8 * sizeof(T))));
  }
  template <class T>
  static Bits ordered(const T* source) {
    static_assert(sizeof(T) == 2);
    const uint32x4_t bits = load_words(source);
    const uint32x4_t negative = vreinterpretq_u32_s16(vshrq_n_s16(vreinterpretq_s16_u32(bits), 15));
    return veorq_u32(bits, vorrq_u32(negative, set_bits<T>(0x8000)));
  }
  static Bits sign_mask(Bits value) {
    return vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(value), 31));
  }
  static Bits ordered_of(Float value) {
    const uint32x4_t bits = vreinterpretq_u32_f32(value);
    return veorq_u32(bits, vorrq_u32(sign_mask(bits), set_bits<float>(0x80000000U)));
  }
  static Bits unordered(Bits ordered) {
    const uint32x4_t flipped = vbicq_u32(set_bits<float>(0x7FFFFFFFU), sign_mask(ordered));
    return veorq_u32(ordered, vorrq_u32(flipped, set_bits<float>(0x80000000U)));
  }
  static Bits low_halves(Bits value) { return vshlq_n_u32(value, 16); }
  static Bits high_halves(Bits value) { return vandq_u32(value, set_bits<float>(0xFFFF0000U)); }
  template <class T>
  static Float value_of_upper(Bits bits) {
    if constexpr (std::is_same_v<T, Float16>) {
      return vcvt_f32_f16(vreinterpret_f16_u16(vshrn_n_u32(bits, 16)));
    } else {
      return vreinterpretq_f32_u32(sizeof(T) == 2 ? high_halves(bits) : bits);
    }
  }
  template <class Operation>
  static Bits across(const Bits* each, const Operation& both) {
    const uint32x4_t first = fold_halves(each[0], each[1], both);
    const uint32x4_t second = fold_halves(each[2], each[3], both);
    return both(vuzp1q_u32(first, second), vuzp2q_u32(first, second));
  }
  template <class Operation>
  static Bits fold_halves(Bits a, Bits b, const Operation& both) {
    const uint64x2_t first = vreinterpretq_u64_u32(a);
    const uint64x2_t second = vreinterpretq_u64_u32(b);
    return both(vreinterpretq_u32_u64(vzip1q_u64(first, second)),
                vreinterpretq_u32_u64(vzip2q_u64(first, second)));
  }
  static Bits magnitudes_of(Float value) { return vreinterpretq_u32_f32(abs(value)); }
  static uint16x8_t as_halves(Bits value) { return vreinterpretq_u16_u32(value); }
  template <class T>
  static Bits decrement(Bits value) {
    if constexpr (sizeof(T) == 2) {
      return vreinterpretq_u32_u16(vsubq_u16(as_halves(value), vdupq_n_u16(1)));
    } else {
      return vsubq_u32(value, set_bits<T>(1));
    }
  }
  template <class T>
  static Bits max(Bits a, Bits b) {
    if constexpr (sizeof(T) == 2) {
      return vreinterpretq_u32_u16(vmaxq_u16(as_halves(a), as_halves(b)));
    } else {
      return vmaxq_u32(a, b);
    }
  }
  template <class T>
  static Bits min(Bits a, Bits b) {
    if constexpr (sizeof(T) == 2) {
      return vreinterpretq_u32_u16(vminq_u16(as_halves(a), as_halves(b)));
    } else {
      return vminq_u32(a, b);
    }
  }
  template <class T>
  static UnsignedOf<T> highest(Bits value) {
    if constexpr (sizeof(T) == 2) {
      return vmaxvq_u16(as_halves(value));
    } else {
      return vmaxvq_u32(value);
    }
  }
  template <class T>
  static UnsignedOf<T> lowest(Bits value) {
    if constexpr (sizeof(T) == 2) {
      return vminvq_u16(as_halves(value));
    } else {
      return vminvq_u32(value);
    }
  }
};

}  // namespace zero_ext::core
