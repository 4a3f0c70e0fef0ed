#include "../../core/simd/isa.h"

#include "../test_support.h"

namespace zero_ext::core {
namespace {

TEST(InstructionSet, OnlyWhatTheMachineHasCanBeSelected) {
  EXPECT_EQ(active_isa(), widest_isa());
  for (const Isa isa : kAllIsas) {
    const Isa before = active_isa();
    EXPECT_EQ(select_isa(isa), has_isa(isa));
    EXPECT_EQ(active_isa(), has_isa(isa) ? isa : before);
  }
  EXPECT_TRUE(select_isa(widest_isa()));
}

TEST(InstructionSet, FollowsTheProcessor) {
  EXPECT_TRUE(has_isa(Isa::scalar));
  EXPECT_TRUE(has_isa(widest_isa()));
#if defined(__aarch64__)
  EXPECT_EQ(widest_isa(), Isa::neon);
  EXPECT_FALSE(has_isa(Isa::avx2));
  EXPECT_FALSE(has_isa(Isa::avx512_bf16));
#else
  EXPECT_FALSE(has_isa(Isa::neon));
#endif
}

}  // namespace
}  // namespace zero_ext::core
