#include "squared_norm.h"

#include <cstddef>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace zero_ext::core {
namespace {

// Exact arithmetic needs round-to-nearest and subnormals that are not flushed, whatever mode the
// calling thread is in.
class ExactArithmetic {
 public:
#if defined(__x86_64__)
  ExactArithmetic() : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~ExactArithmetic() { _mm_setcsr(saved_); }
  ExactArithmetic(const ExactArithmetic&) = delete;
  ExactArithmetic& operator=(const ExactArithmetic&) = delete;

 private:
  static constexpr unsigned kDefault = 0x1F80;
  unsigned saved_;
#endif
};

}  // namespace

void add_squares(const void* values, NumericType type, std::int64_t begin, std::int64_t end,
                 Superaccumulator& total) {
  [[maybe_unused]] const ExactArithmetic exact;
  const auto* bytes = static_cast<const std::byte*>(values) + begin * element_size(type);
  active_kernels().squared_norm[static_cast<int>(type)](bytes, end - begin, total);
}

}  // namespace zero_ext::core
