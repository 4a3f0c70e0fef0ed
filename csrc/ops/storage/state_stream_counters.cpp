#include <array>

#include "state_stream.h"

namespace zero_ext::ops {
namespace {

constexpr std::int64_t kCounters = 7;

}  // namespace

void check_counters(const Tensor& counters, const char* op) {
  check_dtype(counters, {op, "counters"}, ScalarType::Long);
  check_flat(counters, {op, "counters"}, kCounters);
}

void add_counters(const Tensor& counters, const core::PipelineCounters& passed) {
  const std::array<std::int64_t, kCounters> values{passed.bytes_read,
                                                   passed.bytes_written,
                                                   passed.padding_read,
                                                   passed.padding_written,
                                                   passed.waiting_for_reads.count(),
                                                   passed.waiting_for_writes.count(),
                                                   passed.computing.count()};
  auto* const totals = counters.mutable_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < values.size(); ++i) totals[i] += values[i];
}

}  // namespace zero_ext::ops
