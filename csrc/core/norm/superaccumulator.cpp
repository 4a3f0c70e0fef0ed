#include "superaccumulator.h"

#include "superaccumulator_formula.h"

namespace zero_ext::core {
namespace {

// One addition grows a limb by less than 2^40, so this many stay below 2^62.
constexpr std::int64_t kAdditionsBeforeCarry = std::int64_t{1} << 22;

}  // namespace

void Superaccumulator::add(double value) {
  split_into_limbs(value, [this](int limb, std::int64_t amount) {
    limbs_[static_cast<std::size_t>(limb)] += amount;
  });
  if (++pending_ == kAdditionsBeforeCarry) {
    normalize(limbs_);
    pending_ = 0;
  }
}

void Superaccumulator::merge(const Superaccumulator& other) {
  Superaccumulator addend = other;
  normalize(addend.limbs_);
  normalize(limbs_);
  pending_ = 0;
  for (std::size_t i = 0; i < kLimbs; ++i) limbs_[i] += addend.limbs_[i];
  non_finite_ += other.non_finite_;
}

void Superaccumulator::add_to(std::span<std::int64_t, kEntries> entries) {
  normalize(limbs_);
  pending_ = 0;
  for (std::size_t i = 0; i < kLimbs; ++i) entries[i] += limbs_[i];
  entries[kLimbs] += non_finite_;
  normalize(entries.first<kLimbs>());
}

void Superaccumulator::normalize(std::span<std::int64_t, kLimbs> limbs) {
  carry_limbs(limbs.data());
}

bool Superaccumulator::value(std::span<const std::int64_t, kEntries> entries, double& result) {
  return rounded_sum(entries.data(), result);
}

}  // namespace zero_ext::core
