#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <sstream>
#include <vector>

#include "../simd/isa.h"
#include "attention_kernels.h"
#include "query_tile.h"

namespace zero_ext::core {
namespace {

// Floats at the start of a cache line.
class AlignedFloats {
 public:
  explicit AlignedFloats(std::int64_t count) : memory_(allocate(count)) {}
  float* data() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  static float* allocate(std::int64_t count) {
    constexpr std::size_t line = 64;
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(float);
    void* memory = std::aligned_alloc(line, (bytes + line - 1) / line * line + line);
    if (memory == nullptr) throw std::bad_alloc();
    return static_cast<float*>(memory);
  }
  std::unique_ptr<float[], Free> memory_;
};

const AttentionKernels::OfType& kernels_for(const AttentionArgs& args) {
  return active_attention().of_type[static_cast<int>(args.type)];
}

std::int64_t row_tiles(const AttentionArgs& args) {
  return ceil_div(args.query_length, tile_length(args));
}

// Calls visit(item, scratch) for items [0, items), which workers take one by one. Scratch is made
// before they start, so that no thread can fail for want of memory.
template <class Visit>
void distribute_items(const Workers& workers, std::int64_t items, std::int64_t scratch_floats,
                      const Visit& visit) {
  const std::int64_t count = std::clamp<std::int64_t>(items, 0, workers.count);
  if (count == 0) return;
  std::vector<AlignedFloats> scratch;
  for (std::int64_t i = 0; i < count; ++i) scratch.emplace_back(scratch_floats);
  std::atomic<std::int64_t> next{0};
  workers.run(count, [&](std::int64_t worker) {
    float* const own = scratch[static_cast<std::size_t>(worker)].data();
    for (std::int64_t item = next++; item < items; item = next++) visit(item, own);
  });
}

// The row tiles of all heads of one batch entry, those with many blocks first: they would keep
// one worker busy when the others have done.
class TileOrder {
 public:
  explicit TileOrder(const AttentionArgs& args) {
    const BlockRows& layout = args.layout;
    const std::int64_t tiles = row_tiles(args);
    const std::int64_t per_block = layout.block / tile_length(args);
    std::vector<Tile> light;
    for (std::int64_t head = 0; head < args.heads; ++head) {
      const std::int32_t* pointers =
          layout.pointers + (layout.heads == 1 ? 0 : head) * (layout.row_blocks + 1);
      const std::int64_t blocks = pointers[layout.row_blocks] - pointers[0];
      for (std::int64_t index = 0; index < tiles; ++index) {
        const std::int64_t row = index / per_block;
        const std::int64_t own = pointers[row + 1] - pointers[row];
        const bool heavy = own * layout.row_blocks > kHeavy * blocks;
        (heavy ? tiles_ : light)
            .push_back({static_cast<std::int32_t>(head), static_cast<std::int32_t>(index)});
      }
    }
    heavy_ = static_cast<std::int64_t>(tiles_.size());
    tiles_.insert(tiles_.end(), light.begin(), light.end());
  }

  std::int64_t count() const { return static_cast<std::int64_t>(tiles_.size()); }

  struct TilePosition {
    std::int64_t batch, head, index;
  };
  // The item-th of all batch entries' tiles.
  TilePosition at(const AttentionArgs& args, std::int64_t item) const {
    const std::int64_t all_heavy = heavy_ * args.batch;
    const bool heavy = item < all_heavy;
    const std::int64_t first = heavy ? 0 : heavy_;
    const std::int64_t each = heavy ? heavy_ : count() - heavy_;
    const std::int64_t within = heavy ? item : item - all_heavy;
    const Tile tile = tiles_[static_cast<std::size_t>(first + within % each)];
    return {within / each, tile.head, tile.index};
  }

 private:
  static constexpr std::int64_t kHeavy = 4;  // times the mean number of blocks
  struct Tile {
    std::int32_t head, index;
  };
  std::vector<Tile> tiles_;
  std::int64_t heavy_ = 0;
};

class Backward {
 public:
  Backward(const AttentionArgs& args, const AttentionGradArgs& gradients, const Workers& workers)
      : args_(args),
        gradients_(gradients),
        workers_(workers),
        kernels_(kernels_for(args)),
        dim_(padded_dim(args.head_dim)),
        scratch_(round_up(kernels_.backward_floats(args.head_dim), 16)) {}

  // One pass makes five products of a tile but has only as many items as there are key heads; two
  // passes make seven, in any number of items. The bits are the same.
  void run() const {
    const std::int64_t owners = args_.batch * args_.key_heads;
    if (gradients_.bias != nullptr) {
      const std::int64_t* sizes = args_.bias.sizes;
      std::fill_n(gradients_.bias, sizes[0] * sizes[1] * sizes[2] * sizes[3], 0.0F);
    }
    if (owners > 0) {
      const std::int64_t rounds = ceil_div(owners, workers_.count);
      if (5 * rounds * workers_.count <= 7 * owners || workers_.count == 1) {
        keys(1, true);
      } else {
        keys(ceil_div(kItemsPerWorker * workers_.count, owners), false);
        queries();
      }
    }
    if (gradients_.bias != nullptr && !bias_has_owners()) bias();
  }

 private:
  static constexpr std::int64_t kItemsPerWorker = 4;

  // Whether no two row tiles add to one entry of the bias's gradient: the passes above add it up.
  bool bias_has_owners() const {
    const std::int64_t* sizes = args_.bias.sizes;
    return gradients_.bias != nullptr && sizes[0] == args_.batch && sizes[1] == args_.heads &&
           sizes[2] == args_.query_length;
  }

  std::size_t bytes_of_rows(std::int64_t rows) const {
    return static_cast<std::size_t>(rows * args_.head_dim * element_size(args_.type));
  }

  // Keys' and values' gradients, in `splits` ranges of each key head.
  void keys(std::int64_t splits, bool with_queries) const {
    const std::int64_t block = args_.layout.block;
    const std::int64_t blocks = args_.column_blocks();
    const std::int64_t length =
        std::max(ceil_div(blocks, std::max<std::int64_t>(splits, 1)), std::int64_t{1}) * block;
    // Without keys there is still the queries' gradient to write.
    const std::int64_t ranges = std::max(ceil_div(args_.key_length, length), std::int64_t{1});
    const std::int64_t sums = std::min(length, args_.key_length) * dim_;
    const std::int64_t group = args_.group();
    distribute_items(
        workers_, args_.batch * args_.key_heads * ranges, scratch_ + 2 * sums,
        [&](std::int64_t item, float* memory) {
          const std::int64_t owner = item / ranges;
          const std::int64_t batch = owner / args_.key_heads;
          const std::int64_t key_head = owner % args_.key_heads;
          const std::int64_t first = item % ranges * length;
          const std::int64_t end = std::min(first + length, args_.key_length);
          float* const key_sums = memory + scratch_;
          float* const value_sums = key_sums + sums;
          std::fill_n(key_sums, 2 * sums, 0.0F);
          kernels_.backward(
              args_, gradients_,
              {batch, key_head * group, (key_head + 1) * group, 0, row_tiles(args_), first, end,
               with_queries, with_queries && bias_has_owners(), key_sums, value_sums},
              memory);
          const std::int64_t row = owner * args_.key_length + first;
          kernels_.write_rows(key_sums, end - first, args_.head_dim, args_.scale,
                              static_cast<char*>(gradients_.key) + bytes_of_rows(row));
          kernels_.write_rows(value_sums, end - first, args_.head_dim, 1.0F,
                              static_cast<char*>(gradients_.value) + bytes_of_rows(row));
        });
  }

  void queries() const {
    const TileOrder order(args_);
    distribute_items(
        workers_, order.count() * args_.batch, scratch_, [&](std::int64_t item, float* memory) {
          const auto [batch, head, index] = order.at(args_, item);
          kernels_.backward(args_, gradients_,
                            {batch, head, head + 1, index, index + 1, 0, args_.key_length, true,
                             bias_has_owners(), nullptr, nullptr},
                            memory);
        });
  }

  // Every item owns entries of the bias's gradient and adds up all that they were added to.
  void bias() const {
    const std::int64_t* sizes = args_.bias.sizes;
    const std::int64_t tiles = row_tiles(args_);
    const std::int64_t block = args_.layout.block;
    const std::int64_t blocks = args_.column_blocks();
    const std::int64_t row_splits = sizes[2] == 1 ? 1 : tiles;
    const std::int64_t max_splits =
        ceil_div(kItemsPerWorker * workers_.count, std::max<std::int64_t>(sizes[1], 1));
    const std::int64_t key_splits =
        sizes[2] != 1 || sizes[3] == 1 ? 1 : std::clamp<std::int64_t>(blocks, 1, max_splits);
    const std::int64_t length = std::max<std::int64_t>(ceil_div(blocks, key_splits), 1) * block;
    const auto range = [](std::int64_t size, std::int64_t all, std::int64_t index) {
      return size == 1 ? std::pair{std::int64_t{0}, all} : std::pair{index, index + 1};
    };
    distribute_items(
        workers_, sizes[0] * sizes[1] * row_splits * key_splits, scratch_,
        [&](std::int64_t item, float* memory) {
          const std::int64_t keys = item % key_splits;
          const std::int64_t rows = item / key_splits % row_splits;
          const std::int64_t outer = item / key_splits / row_splits;
          const auto batch = range(sizes[0], args_.batch, outer / sizes[1]);
          const auto head = range(sizes[1], args_.heads, outer % sizes[1]);
          const auto tile = range(sizes[2], tiles, rows);
          const std::int64_t end = keys + 1 == key_splits ? args_.key_length : (keys + 1) * length;
          kernels_.bias(args_, gradients_,
                        {batch.first, batch.second, head.first, head.second, tile.first,
                         tile.second, keys * length, std::min(end, args_.key_length)},
                        memory);
        });
  }

  const AttentionArgs& args_;
  const AttentionGradArgs& gradients_;
  const Workers& workers_;
  const AttentionKernels::OfType& kernels_;
  const std::int64_t dim_;
  const std::int64_t scratch_;  // floats of the kernels' own
};

}  // namespace

const AttentionKernels& active_attention() {
#if defined(__x86_64__)
  switch (active_isa()) {
    case Isa::avx512_bf16:
      return kAvx512BFloat16Attention;
    case Isa::avx512:
      return kAvx512Attention;
    case Isa::avx2:
      return kAvx2Attention;
    case Isa::neon:
    case Isa::scalar:
      break;
  }
#elif defined(__aarch64__)
  if (active_isa() == Isa::neon) return kNeonAttention;
#endif
  return kScalarAttention;
}

std::string layout_error(const BlockRows& layout, std::int64_t total_blocks,
                         std::int64_t column_blocks) {
  std::ostringstream error;
  for (std::int64_t head = 0; head < layout.heads; ++head) {
    const std::int32_t* pointers = layout.pointers + head * (layout.row_blocks + 1);
    for (std::int64_t row = 0; row < layout.row_blocks; ++row) {
      const std::int64_t begin = pointers[row];
      const std::int64_t end = pointers[row + 1];
      if (begin < 0 || begin > end || end > total_blocks) {
        error << "argument 'row_pointers': expected numbers that ascend from 0 to at most the "
              << total_blocks << " entries of 'columns', got " << begin << " at [" << head << ", "
              << row << "] and " << end << " after it. Build the layout anew.";
        return error.str();
      }
      std::int64_t before = -1;
      for (std::int64_t at = begin; at < end; ++at) {
        const std::int64_t column = layout.columns[at];
        if (column <= before || column >= column_blocks) {
          error << "argument 'columns': expected columns of a row that ascend and lie below "
                << column_blocks << ", the number of column blocks, got " << column << " at " << at
                << ", in row [" << head << ", " << row << "]. Build the layout anew.";
          return error.str();
        }
        before = column;
      }
    }
  }
  return {};
}

void attention_forward(const AttentionArgs& args, const AttentionResult& result,
                       const Workers& workers) {
  const AttentionKernels::OfType& kernels = kernels_for(args);
  const TileOrder order(args);
  distribute_items(workers, order.count() * args.batch, kernels.forward_floats(args.head_dim),
                   [&](std::int64_t item, float* memory) {
                     const auto [batch, head, index] = order.at(args, item);
                     kernels.forward(args, result, batch, head, index, memory);
                   });
}

void attention_backward(const AttentionArgs& args, const AttentionGradArgs& gradients,
                        const Workers& workers) {
  Backward(args, gradients, workers).run();
}

}  // namespace zero_ext::core
