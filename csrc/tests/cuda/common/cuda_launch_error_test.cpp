#include <gtest/gtest.h>

#include "../../../cuda/common/launch_error.h"

namespace zero_ext::cuda {
namespace {

constexpr GpuProperties gpu(int major, int minor) { return {1, major, minor, 49152, 65536}; }

bool holds(const std::string& text, const std::string& chunk) {
  return text.find(chunk) != std::string::npos;
}

TEST(CudaLaunchError, NamesTheGpuWhatItHasAndWhatToDo) {
  const std::string old = explain(LaunchError::no_code, gpu(7, 5));
  EXPECT_TRUE(holds(old, "cuda:1, of compute capability 7.5") && holds(old, "need 8.0 or higher"))
      << old;
  const std::string missing = explain(LaunchError::no_code, gpu(8, 6));
  EXPECT_TRUE(holds(missing, "8.6") && holds(missing, "Build the module again")) << missing;
  EXPECT_FALSE(holds(missing, "need 8.0")) << missing;
  const std::string driver = explain(LaunchError::old_driver, gpu(12, 0));
  EXPECT_TRUE(holds(driver, "12.0") && holds(driver, "Update the driver")) << driver;
  const std::string resources = explain(LaunchError::resources, gpu(8, 0));
  EXPECT_TRUE(holds(resources, "49152 bytes of shared memory")) << resources;
  EXPECT_TRUE(holds(resources, "65536 registers")) << resources;
}

}  // namespace
}  // namespace zero_ext::cuda
