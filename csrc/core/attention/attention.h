// Block-sparse attention on the CPU.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "attention_args.h"

namespace zero_ext::core {

// Calls work(worker) once for each worker in [0, workers), at the same time where there are threads
// to do so.
using RunWorkers =
    std::function<void(std::int64_t workers, const std::function<void(std::int64_t)>& work)>;

struct Workers {
  std::int64_t count;
  RunWorkers run;
};

// What is wrong with the pointers and columns of a layout, each of which must lie in its range and
// ascend; empty if nothing is.
std::string layout_error(const BlockRows& layout, std::int64_t total_blocks,
                         std::int64_t column_blocks);

// The same bits for any number of workers.
void attention_forward(const AttentionArgs& args, const AttentionResult& result,
                       const Workers& workers);
void attention_backward(const AttentionArgs& args, const AttentionGradArgs& gradients,
                        const Workers& workers);

}  // namespace zero_ext::core
