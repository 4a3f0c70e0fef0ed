#include "../../core/simd/isa.h"

#include "../test_support.h"

namespace zero_ext::core {
namespace {

TEST(InstructionSet, OnlyWhatTheMachineHasCanBeSelected) {
  EXPECT_EQ(active_isa(), widest_isa());
  for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512_bf16}) {
    EXPECT_EQ(select_isa(isa), isa <= widest_isa());
    if (isa <= widest_isa()) {
      EXPECT_EQ(active_isa(), isa);
    }
  }
  EXPECT_TRUE(select_isa(widest_isa()));
}

}  // namespace
}  // namespace zero_ext::core
