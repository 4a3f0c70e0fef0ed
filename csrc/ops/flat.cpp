// zero_ext::pack_, accumulate_ and unpack_: tensors into and out of one flat buffer.
#include "../core/flat.h"

#include <algorithm>

#include "checks.h"

namespace zero_ext::ops {
namespace {

constexpr std::int64_t kGrain = 65536;

// One tensor's place in the flat buffer.
struct Piece {
  void* tensor;
  core::NumericType type;
  std::int64_t offset;  // in the flat buffer, in elements
  std::int64_t start;   // elements of all earlier pieces
};

struct Pieces {
  std::vector<Piece> list;
  std::int64_t total = 0;
  std::byte* flat = nullptr;
  core::NumericType flat_type = core::NumericType::float32;
};

Pieces read_pieces(const char* op, const Tensor& flat, const std::vector<Tensor>& tensors,
                   const std::vector<std::int64_t>& offsets) {
  Pieces pieces;
  pieces.flat_type = check_numeric(flat, {op, "flat"});
  check_flat(flat, {op, "flat"}, flat.numel());
  STD_TORCH_CHECK(tensors.size() == offsets.size(), op, ": ", tensors.size(), " tensors but ",
                  offsets.size(), " offsets; give one offset for each tensor");
  pieces.flat = static_cast<std::byte*>(flat.mutable_data_ptr());
  const auto base = reinterpret_cast<std::uintptr_t>(pieces.flat);
  const auto size = static_cast<std::uintptr_t>(core::element_size(pieces.flat_type));
  std::vector<Extent> memory{extent(flat, {op, "flat"})};
  std::vector<Extent> places;
  pieces.list.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::string index = "[" + std::to_string(i) + "]";
    const core::NumericType type = check_numeric(tensors[i], {op, "tensors" + index});
    const std::int64_t numel = tensors[i].numel();
    const std::int64_t offset = offsets[i];
    STD_TORCH_CHECK(offset >= 0 && offset <= flat.numel() && numel <= flat.numel() - offset, op,
                    ": tensors", index, " of ", numel, " elements at offset ", offset,
                    " does not fit into argument 'flat' of ", flat.numel(), " elements");
    pieces.list.push_back({tensors[i].mutable_data_ptr(), type, offset, pieces.total});
    pieces.total += numel;
    memory.push_back(extent(tensors[i], {op, "tensors" + index}));
    const auto place = base + static_cast<std::uintptr_t>(offset) * size;
    places.push_back(
        {place, place + static_cast<std::uintptr_t>(numel) * size, {op, "offsets" + index}});
  }
  check_disjoint(std::move(memory));
  check_disjoint(std::move(places));
  return pieces;
}

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
