// Registration of ops: each has its schema and its function named once, next to each other.
#pragma once

#include <cstdint>
#include <string>

#include "torch_stable.h"

namespace zero_ext::ops {

// Declares the ops that it is called with, or implements them for a dispatch key.
class OpList {
 public:
  enum class Action { kDeclare, kImplement };

  OpList(torch::stable::detail::StableLibrary& library, Action action)
      : library_(library), action_(action) {}

  // "name(arguments) -> results" and TORCH_BOX of the function.
  void operator()(const std::string& schema,
                  void (*boxed)(StableIValue*, std::uint64_t, std::uint64_t)) const {
    if (action_ == Action::kDeclare) {
      library_.def(schema.c_str());
    } else {
      library_.impl(schema.substr(0, schema.find('(')).c_str(), boxed);
    }
  }

 private:
  torch::stable::detail::StableLibrary& library_;
  Action action_;
};

}  // namespace zero_ext::ops

// Before a block that calls ops(schema, boxed) for all ops of a file with this dispatch key.
#define ZERO_EXT_OPS(key)                                 \
  static void add_ops_##key(const OpList& ops);           \
  STABLE_TORCH_LIBRARY_FRAGMENT(zero_ext, library) {      \
    add_ops_##key({library, OpList::Action::kDeclare});   \
  }                                                       \
  STABLE_TORCH_LIBRARY_IMPL(zero_ext, key, library) {     \
    add_ops_##key({library, OpList::Action::kImplement}); \
  }                                                       \
  static void add_ops_##key(const OpList& ops)
