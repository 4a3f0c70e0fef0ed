// Texts of errors, put together from texts and numbers.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>

namespace zero_ext::core {

// The arguments one after another: texts, and numbers as std::to_string writes them.
template <class... Arguments>
std::string join_text(const Arguments&... arguments) {
  std::string text;
  const auto add = [&text]<class Argument>(const Argument& argument) {
    if constexpr (std::is_arithmetic_v<Argument>) {
      text += std::to_string(argument);
    } else {
      text += std::string_view(argument);
    }
  };
  (add(arguments), ...);
  return text;
}

template <class... Arguments>
std::runtime_error make_error(const Arguments&... arguments) {
  return std::runtime_error(join_text(arguments...));
}

// Throws make_error(arguments...) unless the condition holds.
template <class... Arguments>
void require(bool condition, const Arguments&... arguments) {
  if (!condition) throw make_error(arguments...);
}

// "No space left on device (errno 28)".
inline std::string errno_text(int error) {
  return join_text(std::generic_category().message(error), " (errno ", error, ")");
}

}  // namespace zero_ext::core
