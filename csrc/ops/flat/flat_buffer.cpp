// zero_ext::pack_, accumulate_ and unpack_: tensors into and out of one flat buffer.
#include "../../core/flat/flat_buffer.h"

#include <algorithm>

#include "flat_buffer_arg_checks.h"

namespace zero_ext::ops {
namespace {

using core::Piece;
using core::Pieces;

constexpr std::int64_t kGrain = 65536;

// Calls visit(piece, first element, count) in parallel, each element exactly once.
template <class Visit>
void for_each_part(const Pieces& pieces, const Visit& visit) {
  torch::stable::parallel_for(0, pieces.total, kGrain, [&](std::int64_t begin, std::int64_t end) {
    auto piece =
        std::upper_bound(pieces.list.begin(), pieces.list.end(), begin,
                         [](std::int64_t value, const Piece& each) { return value < each.start; });
    for (--piece; begin < end; ++piece) {
      const auto next = piece + 1;
      const std::int64_t stop = next == pieces.list.end() ? end : std::min(end, next->start);
      if (begin < stop) visit(*piece, begin - piece->start, stop - begin);
      begin = std::max(begin, stop);
    }
  });
}

std::byte* at(void* base, core::NumericType type, std::int64_t index) {
  return static_cast<std::byte*>(base) + index * core::element_size(type);
}

void pack(const Tensor& flat, std::vector<Tensor> tensors, std::vector<std::int64_t> offsets) {
  const Pieces pieces = read_pieces("pack_", flat, tensors, offsets);
  for_each_part(pieces, [&](const Piece& piece, std::int64_t first, std::int64_t count) {
    core::copy_cast(at(pieces.flat, pieces.flat_type, piece.offset + first), pieces.flat_type,
                    at(piece.tensor, piece.type, first), piece.type, count);
  });
}

void accumulate(const Tensor& flat, std::vector<Tensor> tensors,
                std::vector<std::int64_t> offsets) {
  const Pieces pieces = read_pieces("accumulate_", flat, tensors, offsets);
  for_each_part(pieces, [&](const Piece& piece, std::int64_t first, std::int64_t count) {
    core::accumulate_cast(at(pieces.flat, pieces.flat_type, piece.offset + first), pieces.flat_type,
                          at(piece.tensor, piece.type, first), piece.type, count);
  });
}

void unpack(const Tensor& flat, std::vector<Tensor> tensors, std::vector<std::int64_t> offsets) {
  const Pieces pieces = read_pieces("unpack_", flat, tensors, offsets);
  for_each_part(pieces, [&](const Piece& piece, std::int64_t first, std::int64_t count) {
    core::copy_cast(at(piece.tensor, piece.type, first), piece.type,
                    at(pieces.flat, pieces.flat_type, piece.offset + first), pieces.flat_type,
                    count);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_ext, library) {
  library.def("pack_(Tensor(a!) flat, Tensor[] tensors, int[] offsets) -> ()");
  library.def("accumulate_(Tensor(a!) flat, Tensor[] tensors, int[] offsets) -> ()");
  library.def("unpack_(Tensor flat, Tensor(a!)[] tensors, int[] offsets) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CPU, library) {
  library.impl("pack_", TORCH_BOX(&pack));
  library.impl("accumulate_", TORCH_BOX(&accumulate));
  library.impl("unpack_", TORCH_BOX(&unpack));
}

}  // namespace zero_ext::ops
