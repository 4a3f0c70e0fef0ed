#include <cstring>
#include <limits>
#include <optional>

#include "../core/adam.h"
#include "../cuda/adam_kernel.h"
#include "../cuda/dispatch.h"
#include "emulated_launch.h"
#include "test_support.h"

namespace zero_ext::cuda {
namespace {

using core::AdamBuffers;
using core::NumericType;
using core::testing::fresh_generator;
using zero_ext::testing::emulate_launch;

constexpr NumericType kTypes[] = {NumericType::float32, NumericType::bfloat16,
                                  NumericType::float16};

// Bytes that start `shift` elements behind an address aligned for packs, and end with the
// allocation: a sanitizer sees any access past them.
class Buffer {
 public:
  Buffer(std::int64_t count, NumericType type, std::int64_t shift, std::mt19937_64& generator,
         bool positive = false)
      : offset_(static_cast<std::size_t>(shift * core::element_size(type))),
        bytes_(offset_ + static_cast<std::size_t>(count * core::element_size(type))) {
    std::normal_distribution<float> normal;
    with_type(type, [&]<class T>(std::type_identity<T>) {
      for (std::int64_t i = 0; i < count; ++i) {
        const float value = normal(generator);
        const T element = core::from_float<T>(positive ? value * value : value);
        std::memcpy(bytes_.data() + offset_ + i * sizeof(T), &element, sizeof(T));
      }
    });
  }
  void* data() { return bytes_.data() + offset_; }
  bool operator==(const Buffer& other) const { return bytes_ == other.bytes_; }

 private:
  std::size_t offset_;
  std::vector<std::byte> bytes_;  // from operator new, which aligns to 16 bytes
};

struct Types {
  NumericType moments;
  NumericType grad;
  std::optional<NumericType> param;
};

struct Problem {
  Types types;
  Buffer master;
  Buffer exp_avg;
  Buffer exp_avg_sq;
  Buffer grad;
  Buffer param;

  Problem(std::int64_t count, const Types& with, std::int64_t shift, std::mt19937_64& generator)
      : types(with),
        master(count, NumericType::float32, shift, generator),
        exp_avg(count, with.moments, shift, generator),
        exp_avg_sq(count, with.moments, shift, generator, true),
        grad(count, with.grad, shift, generator),
        param(count, with.param.value_or(NumericType::float32), shift, generator) {}

  AdamBuffers buffers() {
    return {static_cast<float*>(master.data()),
            exp_avg.data(),
            exp_avg_sq.data(),
            types.moments,
            grad.data(),
            types.grad,
            types.param ? param.data() : nullptr,
            types.param};
  }
  bool operator==(const Problem& other) const {
    return master == other.master && exp_avg == other.exp_avg && exp_avg_sq == other.exp_avg_sq &&
           grad == other.grad && param == other.param;
  }
};

// Segments as the op gets them, in tensors.
struct Plan {
  std::vector<std::int64_t> bounds;
  std::vector<double> hyper;
  float scale = 0.37F;

  void add(std::int64_t begin, std::int64_t end, const core::AdamHyperParameters& values) {
    bounds.insert(bounds.end(), {begin, end});
    hyper.insert(hyper.end(),
                 {values.lr, values.beta1, values.beta2, values.eps, values.weight_decay,
                  values.step, values.decoupled ? 1.0 : 0.0, values.maximize ? 1.0 : 0.0});
  }
  std::int64_t count() const { return static_cast<std::int64_t>(bounds.size() / 2); }

  std::vector<AdamSegment> prepared(std::int64_t numel, std::mt19937_64& generator) const {
    std::vector<AdamSegment> result(bounds.size() / 2);
    emulate_launch(
        PrepareAdamSegments{bounds.data(), hyper.data(), &scale, count(), numel, result.data()}, 5,
        generator);
    return result;
  }
};

constexpr core::AdamHyperParameters kDecoupled{1e-2, 0.9, 0.999, 1e-8, 0.1, 3, true, false};
constexpr core::AdamHyperParameters kCoupled{2e-2, 0.4, 0.99, 1e-6, 0.2, 7, false, true};

// Sorted, disjoint segments with gaps, empty ones, and bounds inside of packs.
Plan random_plan(std::int64_t numel, std::mt19937_64& generator) {
  Plan plan;
  std::int64_t at = 0;
  while (at < numel) {
    const auto gap = static_cast<std::int64_t>(generator() % 4 == 0 ? generator() % 13 : 0);
    const auto length = static_cast<std::int64_t>(generator() % (generator() % 2 == 0 ? 9 : 90));
    const std::int64_t begin = std::min(numel, at + gap);
    at = std::min(numel, begin + length);
    plan.add(begin, at, generator() % 2 == 0 ? kDecoupled : kCoupled);
  }
  return plan;
}

void emulate_step(Problem& problem, std::int64_t numel, const std::vector<AdamSegment>& segments,
                  std::int64_t threads, std::mt19937_64& generator) {
  const AdamBuffers buffers = problem.buffers();
  const auto run = [&]<class Moment, class Grad, class Param>(std::type_identity<Moment>,
                                                              std::type_identity<Grad>,
                                                              std::type_identity<Param>) {
    emulate_launch(AdamStep<Moment, Grad, Param>::of(buffers, numel, segments.data(),
                                                     static_cast<std::int64_t>(segments.size())),
                   threads, generator);
  };
  with_type(buffers.moments, [&]<class Moment>(std::type_identity<Moment> moment) {
    if constexpr (!std::is_same_v<Moment, core::Float16>) {
      with_type(buffers.grad_type, [&](auto grad) {
        if (!buffers.param_type) return run(moment, grad, std::type_identity<NoParam>{});
        with_type(*buffers.param_type, [&](auto param) { run(moment, grad, param); });
      });
    }
  });
}

TEST(CudaAdam, EveryTypeGridAndAlignmentGivesTheBitsOfTheCpu) {
  auto generator = fresh_generator();
  for (const NumericType moments : {NumericType::float32, NumericType::bfloat16}) {
    for (const NumericType grad : kTypes) {
      for (int param = 0; param <= core::kNumericTypes; ++param) {
        const Types types{moments, grad,
                          param == core::kNumericTypes
                              ? std::nullopt
                              : std::optional(static_cast<NumericType>(param))};
        for (const std::int64_t shift : {0, 3}) {
          const auto numel = static_cast<std::int64_t>(1 + generator() % 1200);
          const Plan plan = random_plan(numel, generator);
          const std::vector<AdamSegment> segments = plan.prepared(numel, generator);
          const Problem start(numel, types, shift, generator);
          Problem wanted = start;
          core::adam_step(wanted.buffers(), segments, 0, numel);
          for (const std::int64_t threads : {1, 7, 1000}) {
            Problem problem = start;
            emulate_step(problem, numel, segments, threads, generator);
            EXPECT_TRUE(problem == wanted)
                << "moments " << static_cast<int>(moments) << " grad " << static_cast<int>(grad)
                << " param " << param << " shift " << shift << " threads " << threads;
          }
        }
      }
    }
  }
}

TEST(CudaAdam, PreparesTheSegmentsThatTheCpuReads) {
  auto generator = fresh_generator();
  const Plan plan = random_plan(500, generator);
  const std::vector<AdamSegment> segments = plan.prepared(500, generator);
  for (std::size_t i = 0; i < segments.size(); ++i) {
    EXPECT_EQ(segments[i].begin, plan.bounds[2 * i]);
    EXPECT_EQ(segments[i].end, plan.bounds[2 * i + 1]);
    const auto wanted = core::adam_factors(
        core::adam_hyper_parameters(plan.hyper.data() + core::kAdamHyperParameters * i), 0.37F);
    EXPECT_EQ(segments[i].factors.step_size, wanted.step_size);
    EXPECT_EQ(segments[i].factors.gradient_scale, wanted.gradient_scale);
  }
}

TEST(CudaAdam, AScaleThatIsNotFiniteChangesNothing) {
  auto generator = fresh_generator();
  for (const float scale :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Plan plan = random_plan(300, generator);
    plan.scale = scale;
    const Types types{NumericType::float32, NumericType::bfloat16, NumericType::bfloat16};
    const Problem start(300, types, 0, generator);
    Problem problem = start;
    emulate_step(problem, 300, plan.prepared(300, generator), 40, generator);
    EXPECT_TRUE(problem == start);
  }
}

TEST(CudaAdam, RefusesSegmentsAndHyperParametersOutsideTheirRange) {
  auto generator = fresh_generator();
  const auto message = [&](const Plan& plan) -> std::string {
    try {
      plan.prepared(100, generator);
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "";
  };
  const auto with = [](std::int64_t begin, std::int64_t end, double beta1) {
    Plan plan;
    plan.add(0, 10, kDecoupled);
    core::AdamHyperParameters second = kDecoupled;
    second.beta1 = beta1;
    plan.add(begin, end, second);
    return plan;
  };
  EXPECT_EQ(message(with(10, 100, 0.9)), "");
  EXPECT_NE(message(with(9, 100, 0.9)).find("begin of segments[1]"), std::string::npos);
  EXPECT_NE(message(with(10, 101, 0.9)).find("end of segments[1]"), std::string::npos);
  EXPECT_NE(message(with(20, 19, 0.9)).find("end of segments[1]"), std::string::npos);
  EXPECT_NE(message(with(10, 100, 1.0)).find("beta1 of hyper[1] is 1.0"), std::string::npos);
}

}  // namespace
}  // namespace zero_ext::cuda
