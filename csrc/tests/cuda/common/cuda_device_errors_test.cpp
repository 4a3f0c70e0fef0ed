#include <array>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../../../cuda/common/error_recording.h"
#include "../../test_support.h"

namespace zero_ext::cuda {
namespace {

// All of an error is a function of its index, so that a mixture of two shows.
DeviceError numbered(std::int64_t i) {
  return {static_cast<DeviceOp>(i % 9),
          static_cast<DeviceArgument>(i % 8),
          i,
          static_cast<DeviceField>(i % 15),
          0.5 * static_cast<double>(i),
          static_cast<ExpectedValue>(i % 12)};
}

bool is_numbered(const DeviceErrorRecord& record) {
  const DeviceError expected = numbered(record.error.index);
  return record.state == DeviceErrorRecord::complete && record.error.op == expected.op &&
         record.error.argument == expected.argument && record.error.field == expected.field &&
         record.error.value == expected.value && record.error.expected == expected.expected;
}

using Words = std::array<std::int64_t, core::kDeviceErrorWords>;

DeviceErrorRecord popped(DeviceErrorRecord& record) {
  Words words;
  words.fill(0x5A5A5A5A5A5A5A5A);
  PopDeviceError{&record, words.data()}(1, 2);  // one thread does it
  EXPECT_EQ(words.front(), 0x5A5A5A5A5A5A5A5A);
  PopDeviceError{&record, words.data()}(0, 2);
  DeviceErrorRecord found;
  std::memcpy(&found, words.data(), sizeof(found));
  return found;
}

TEST(CudaDeviceErrors, TheFirstStaysUntilItIsPopped) {
  DeviceErrorRecord record{};
  EXPECT_FALSE(has_error(&record));
  EXPECT_EQ(core::device_error_text(popped(record)), "");
  record_error(&record, numbered(31));
  record_error(&record, numbered(32));
  EXPECT_TRUE(has_error(&record));
  const DeviceErrorRecord found = popped(record);
  EXPECT_EQ(found.error.index, 31);
  EXPECT_TRUE(is_numbered(found));
  EXPECT_FALSE(has_error(&record));
  EXPECT_EQ(popped(record).state, DeviceErrorRecord::empty);
  record_error(&record, numbered(33));
  EXPECT_EQ(popped(record).error.index, 33);
}

TEST(CudaDeviceErrors, OneThatIsBeingWrittenIsAnErrorAndIsNotPopped) {
  DeviceErrorRecord record{};
  record.state = DeviceErrorRecord::busy;
  EXPECT_TRUE(has_error(&record));
  EXPECT_EQ(popped(record).state, DeviceErrorRecord::empty);
  EXPECT_EQ(record.state, DeviceErrorRecord::busy);
}

TEST(CudaDeviceErrors, ThreadsThatRecordAndPopNeverMixErrors) {
  DeviceErrorRecord record{};
  std::vector<std::thread> threads;
  for (std::int64_t first = 0; first < 4; ++first) {
    threads.emplace_back([&record, first] {
      for (std::int64_t i = first; i < 20000; i += 4) record_error(&record, numbered(i));
    });
  }
  std::set<std::int64_t> seen;
  const auto pop = [&] {
    Words words{};
    PopDeviceError{&record, words.data()}(0, 1);
    DeviceErrorRecord found;
    std::memcpy(&found, words.data(), sizeof(found));
    if (found.state == DeviceErrorRecord::empty) return;
    EXPECT_TRUE(is_numbered(found)) << found.error.index;
    EXPECT_TRUE(seen.insert(found.error.index).second) << found.error.index;
  };
  for (int i = 0; i < 2000; ++i) pop();
  for (std::thread& each : threads) each.join();
  pop();
  EXPECT_FALSE(seen.empty());
}

TEST(CudaDeviceErrors, EveryOpHasItsNumber) {
  for (std::size_t i = 0; i < core::kDeviceOps.size(); ++i) {
    EXPECT_EQ(static_cast<std::size_t>(core::device_op(core::kDeviceOps[i])), i);
  }
  EXPECT_EQ(core::device_op("adam_step_8bit_"), DeviceOp::adam_step_8bit);
  EXPECT_EQ(core::device_op("block_sparse_attention_backward"), DeviceOp::attention_backward);
  EXPECT_STREQ(core::text_of(core::device_op("pack_"), core::kDeviceOps), "unknown");
}

}  // namespace
}  // namespace zero_ext::cuda
