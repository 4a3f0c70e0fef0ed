#include "copies.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <atomic>
#include <cstring>

#include "allocator.h"
#include "pinned.h"

namespace stand_in {
namespace {

std::atomic<std::int64_t> pageable_count{0};

// What a stream needs to know of a tensor once the tensor itself may be gone.
struct Layout {
  void* address;  // of the open alias
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  at::ScalarType dtype;

  at::Tensor tensor() const { return at::from_blob(address, sizes, strides, at::dtype(dtype)); }
};

void* address_of(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : const_cast<void*>(tensor.const_data_ptr());
}

Layout layout_of(const at::Tensor& tensor) {
  return {open_alias(address_of(tensor)), tensor.sizes().vec(), tensor.strides().vec(),
          tensor.scalar_type()};
}

// All bytes between the first and the last element.
Range range_of(const at::Tensor& tensor) {
  std::size_t bytes = tensor.element_size();
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    bytes += static_cast<std::size_t>((tensor.size(dim) - 1) * tensor.stride(dim)) *
             tensor.element_size();
  }
  return {static_cast<const std::byte*>(address_of(tensor)), bytes};
}

void poison(const at::Tensor& tensor) {
  if (in_use(range_of(tensor))) {
    return;  // work in line before this still has a right to the old values
  }
  if (tensor.is_non_overlapping_and_dense()) {
    std::memset(open_alias(address_of(tensor)), kPoison, tensor.nbytes());
  } else if (at::isFloatingType(tensor.scalar_type())) {
    layout_of(tensor).tensor().fill_(std::numeric_limits<double>::quiet_NaN());
  }
}

void copy_now(const Layout& source, const Layout& destination, bool same) {
  if (same) {
    std::memcpy(destination.address, source.address,
                static_cast<std::size_t>(c10::multiply_integers(source.sizes)) *
                    c10::elementSize(source.dtype));
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  destination.tensor().copy_(source.tensor());
}

bool is_device(const at::Tensor& tensor) { return tensor.device().is_privateuseone(); }

// Pageable host memory is read before the call returns, as on a real device; whoever counts on
// overlap there is told by `pageable_copies`.
at::Tensor staged(const at::Tensor& source) {
  ++pageable_count;
  return source.clone();
}

}  // namespace

std::int64_t pageable_copies() { return pageable_count; }

at::Tensor copy_from(const at::Tensor& original, const at::Tensor& destination, bool non_blocking) {
  at::Tensor source = original.expand(destination.sizes());
  if (destination.numel() == 0) {
    return destination;
  }
  if (is_device(source) && is_device(destination)) {
    TORCH_CHECK(source.device() == destination.device(),
                "stand_in: copies between two devices go through the host");
    non_blocking = true;
  }
  Stream& stream = current_stream(is_device(destination) ? destination.device().index()
                                                         : source.device().index());
  at::Tensor stage;
  if (non_blocking && !is_device(source) && !is_pinned(source.const_data_ptr())) {
    source = stage = staged(source);
  } else if (non_blocking && !is_device(destination) && !is_pinned(destination.const_data_ptr())) {
    ++pageable_count;
    non_blocking = false;
  }
  const bool same = source.scalar_type() == destination.scalar_type() && source.is_contiguous() &&
                    destination.is_contiguous();
  if (non_blocking) {
    poison(destination);
  }
  const Layout from = layout_of(source);
  const Layout into = layout_of(destination);
  stream.enqueue({[from, into, same, stage] { copy_now(from, into, same); },
                  {range_of(source), range_of(destination)}});
  if (!non_blocking) {
    stream.drain();
  }
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& destination) {
  destination.resize_(source.sizes());
  return copy_from(source, destination, false);
}

at::Scalar read_scalar(const at::Tensor& tensor) {
  current_stream(tensor.device().index()).drain();
  return layout_of(tensor).tensor().item();
}

}  // namespace stand_in
