// Texts of errors, made of parts.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>

namespace zero_ext::core {

// The parts one after another: texts, and numbers as std::to_string writes them.
template <class... Parts>
std::string join_text(const Parts&... parts) {
  std::string text;
  const auto add = [&text]<class Part>(const Part& part) {
    if constexpr (std::is_arithmetic_v<Part>) {
      text += std::to_string(part);
    } else {
      text += std::string_view(part);
    }
  };
  (add(parts), ...);
  return text;
}

template <class... Parts>
std::runtime_error make_error(const Parts&... parts) {
  return std::runtime_error(join_text(parts...));
}

// Throws make_error(parts...) unless the condition holds.
template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) throw make_error(parts...);
}

// "No space left on device (errno 28)".
inline std::string errno_text(int error) {
  return join_text(std::generic_category().message(error), " (errno ", error, ")");
}

}  // namespace zero_ext::core
