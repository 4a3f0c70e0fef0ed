#include <array>
#include <cstring>

#include "../../../core/flat/flat_buffer.h"
#include "../../../cuda/common/dispatch.h"
#include "../../../cuda/flat/flat_buffer_kernel.h"
#include "../../test_support.h"
#include "../emulated_launch.h"

namespace zero_ext::cuda {
namespace {

using core::FlatSegment;
using core::FlatSegments;
using core::NumericType;
using core::testing::fresh_generator;
using zero_ext::testing::emulate_launch;

constexpr std::array kTypes{NumericType::float32, NumericType::bfloat16, NumericType::float16};

std::vector<std::byte> normal_bytes(std::int64_t count, NumericType type,
                                    std::mt19937_64& generator) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(count * core::element_size(type)));
  with_type(type, [&]<class T>(std::type_identity<T>) {
    const auto values = core::testing::normal_values<T>(generator, static_cast<std::size_t>(count));
    if (count > 0) std::memcpy(bytes.data(), values.data(), bytes.size());
  });
  return bytes;
}

// Tensors of all types and their disjoint places in a flat buffer, with gaps.
struct Problem {
  std::vector<std::byte> flat;
  std::vector<std::vector<std::byte>> tensors;
  FlatSegments layout;

  Problem(NumericType flat_type, int count, std::mt19937_64& generator) {
    layout.flat_type = flat_type;
    std::int64_t offset = 0;
    for (int i = 0; i < count; ++i) {
      const NumericType type = kTypes[generator() % kTypes.size()];
      offset += static_cast<std::int64_t>(generator() % 20);
      if (generator() % 2 == 0) offset = (offset + 7) / 8 * 8;  // so that whole packs occur
      const auto numel = static_cast<std::int64_t>(generator() % (i % 10 == 0 ? 1000 : 30));
      tensors.push_back(normal_bytes(numel, type, generator));
      layout.list.push_back({nullptr, type, offset, layout.total, numel});
      layout.total += numel;
      offset += numel;
    }
    flat = normal_bytes(offset, flat_type, generator);
  }

  // With the addresses of this copy of the buffers.
  FlatSegments segments() {
    FlatSegments result = layout;
    result.flat = flat.data();
    for (std::size_t i = 0; i < tensors.size(); ++i) result.list[i].tensor = tensors[i].data();
    return result;
  }
};

template <class Move>
void emulate_move(const FlatSegments& segments, std::int64_t threads, std::mt19937_64& generator) {
  with_type(segments.flat_type, [&]<class Flat>(std::type_identity<Flat>) {
    for (const NumericType type : kTypes) {
      with_type(type, [&]<class Element>(std::type_identity<Element>) {
        for_each_batch<Flat, Element, Move>(
            segments, type, [&](const auto& batch) { emulate_launch(batch, threads, generator); });
      });
    }
  });
}

template <class Move, class Reference>
void expect_the_bits_of_the_cpu(const Reference& reference) {
  auto generator = fresh_generator();
  for (const NumericType flat_type : kTypes) {
    for (const int count : {0, 1, 40, 700}) {  // the last fills batches of every type
      const Problem start(flat_type, count, generator);
      Problem expected = start;
      const FlatSegments segments = expected.segments();
      for (const FlatSegment& segment : segments.list) {
        reference(segments.flat + segment.offset * core::element_size(flat_type), flat_type,
                  segment.tensor, segment.type, segment.numel);
      }
      for (const std::int64_t threads : {1, 33, 3000}) {
        Problem problem = start;
        emulate_move<Move>(problem.segments(), threads, generator);
        EXPECT_TRUE(problem.flat == expected.flat && problem.tensors == expected.tensors)
            << "flat type " << static_cast<int>(flat_type) << ", " << count << " tensors, "
            << threads << " threads";
      }
    }
  }
}

TEST(CudaFlat, PackYieldsTheBitsOfTheCpu) {
  expect_the_bits_of_the_cpu<PackElement>(core::copy_cast);
}

TEST(CudaFlat, AccumulateYieldsTheBitsOfTheCpu) {
  expect_the_bits_of_the_cpu<AccumulateElement>(core::accumulate_cast);
}

TEST(CudaFlat, UnpackYieldsTheBitsOfTheCpu) {
  expect_the_bits_of_the_cpu<UnpackElement>(
      [](const void* flat, NumericType flat_type, void* tensor, NumericType type,
         std::int64_t numel) { core::copy_cast(tensor, type, flat, flat_type, numel); });
}

struct SumProblem {
  std::vector<std::byte> out;
  std::vector<std::vector<std::byte>> shards;

  // Addresses from element `shift` on; with `in_place` the second shard is the target.
  std::vector<const void*> sources(std::int64_t skipped_bytes, bool in_place) {
    std::vector<const void*> result;
    for (const auto& shard : shards) result.push_back(shard.data() + skipped_bytes);
    if (in_place) result[1] = out.data() + skipped_bytes;
    return result;
  }
};

TEST(CudaFlat, SumOfShardsYieldsTheBitsOfTheCpu) {
  auto generator = fresh_generator();
  for (const NumericType target : kTypes) {
    for (const NumericType source : kTypes) {
      for (const std::int64_t shift : {0, 1}) {
        for (const bool accumulate : {false, true}) {
          const auto numel = static_cast<std::int64_t>(generator() % 1000);
          const bool in_place = target == source && generator() % 2 == 0;
          SumProblem start{normal_bytes(numel + shift, target, generator), {}};
          for (std::uint64_t i = 2 + generator() % 5; i > 0; --i) {
            start.shards.push_back(normal_bytes(numel + shift, source, generator));
          }
          const std::int64_t skipped = shift * core::element_size(target);
          const std::int64_t skipped_of_shards = shift * core::element_size(source);
          SumProblem expected = start;
          core::sum_shards(expected.out.data() + skipped, target,
                           expected.sources(skipped_of_shards, in_place), source, 0, numel, 0.3F,
                           accumulate);
          for (const std::int64_t threads : {1, 5, 900}) {
            SumProblem problem = start;
            with_type(target, [&]<class Target>(std::type_identity<Target>) {
              with_type(source, [&]<class Source>(std::type_identity<Source>) {
                emulate_launch(
                    SumShards<Target, Source>::of(problem.out.data() + skipped,
                                                  problem.sources(skipped_of_shards, in_place),
                                                  numel, 0.3F, accumulate),
                    threads, generator);
              });
            });
            EXPECT_TRUE(problem.out == expected.out)
                << "target " << static_cast<int>(target) << " source " << static_cast<int>(source)
                << " shift " << shift << " threads " << threads;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace zero_ext::cuda
