// The ops a device must have of its own, and the controls of the stand-in under torch.ops.stand_in.
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#include <ATen/TensorUtils.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include "allocator.h"
#include "copies.h"
#include "fallback.h"
#include "generator.h"
#include "pinned.h"
#include "process_group.h"

namespace stand_in {
namespace {

using c10::Device;
using OptionalDtype = std::optional<at::ScalarType>;
using OptionalLayout = std::optional<at::Layout>;

at::Tensor empty(at::IntArrayRef size, OptionalDtype dtype, OptionalLayout /*layout*/,
                 std::optional<Device> device, std::optional<bool> /*pin_memory*/,
                 std::optional<at::MemoryFormat> memory_format) {
  const OnDevice guard(device);
  return at::detail::empty_generic(size, &DeviceMemory::get(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), memory_format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, OptionalDtype dtype,
                         OptionalLayout /*layout*/, std::optional<Device> device,
                         std::optional<bool> /*pin_memory*/) {
  const OnDevice guard(device);
  return at::detail::empty_strided_generic(size, stride, &DeviceMemory::get(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat> memory_format) {
  const auto elements =
      static_cast<std::size_t>(c10::multiply_integers(size) + self.storage_offset());
  const std::size_t wanted = elements * self.element_size();
  if (self.storage().nbytes() < wanted) {  // torch would copy what is there by the host
    at::native::resize_bytes_nocuda(self.storage(), wanted);
  }
  return at::native::resize_(self, size, memory_format);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, std::int64_t offset,
                        at::IntArrayRef size, at::IntArrayRef stride) {
  at::native::checkSetStorage(self, source, offset, size, stride);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      size, stride.data() == nullptr ? at::detail::defaultStrides(size) : stride.vec(), offset);
  return self;
}

at::Tensor& set_empty(at::Tensor& self) {
  const at::Tensor empty_one = at::empty({0}, self.options());
  return self.set_(empty_one.storage(), 0, {0}, {1});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  DeviceMemory::get().recordStream(self.storage().data_ptr(), stream);
}

// Whether `parameter.data = tensor` may bring a tensor to the device: else `module.to(device)`
// would make new parameters and untie shared ones, which no real device does.
bool may_set_data(const at::Tensor& self, const at::Tensor& from) {
  const auto is_dense = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided &&
           (tensor.device().is_cpu() || tensor.device().is_privateuseone());
  };
  return is_dense(self) && is_dense(from);
}

void choose_schedule(const std::string& name, std::int64_t seed) {
  TORCH_CHECK(name == "eager" || name == "random" || name == "lazy", "stand_in: schedule is ", name,
              "; eager, random or lazy wanted");
  set_schedule(name == "eager"    ? Schedule::kEager
               : name == "random" ? Schedule::kRandom
                                  : Schedule::kLazy,
               static_cast<std::uint64_t>(seed));
}

void set_memory_limit(std::int64_t device, std::int64_t bytes) {
  DeviceMemory::get().set_limit(static_cast<int>(device), static_cast<std::size_t>(bytes));
}

void pin_range(std::int64_t address, std::int64_t bytes) {
  pin(reinterpret_cast<const void*>(address), static_cast<std::size_t>(bytes));
}

void unpin_range(std::int64_t address) { unpin(reinterpret_cast<const void*>(address)); }

void seed(std::int64_t device, std::int64_t seed) {
  default_generator(static_cast<int>(device)).set_current_seed(static_cast<std::uint64_t>(seed));
}

at::Tensor random_state(std::int64_t device) {
  return default_generator(static_cast<int>(device)).get_state();
}

void set_random_state(std::int64_t device, const at::Tensor& state) {
  default_generator(static_cast<int>(device)).set_state(state);
}

std::int64_t count_pinned() { return static_cast<std::int64_t>(pinned_bytes()); }

// Ops that torch composes of others for devices without a kernel: here they take the CPU's own
// kernel, so that results are the CPU's bit for bit.
void prefer_own_kernels(torch::Library& library) {
  using c10::DispatchKey;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (name.name.rfind("aten::", 0) != 0 || !op ||
        !op->hasKernelForDispatchKey(DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(DispatchKey::PrivateUse1)) {
      continue;
    }
    for (const auto composed :
         {DispatchKey::CompositeExplicitAutograd, DispatchKey::CompositeImplicitAutograd,
          DispatchKey::CompositeExplicitAutogradNonFunctional}) {
      if (op->hasKernelForDispatchKey(composed)) {
        library.impl(c10::toString(name).c_str(),
                     torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
        break;
      }
    }
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("set_.source_Storage", &at::native::set_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_", &set_empty);
  library.impl("_has_compatible_shallow_copy_type", &may_set_data);
  library.impl("record_stream", &record_stream);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &read_scalar);
  prefer_own_kernels(library);
}

TORCH_LIBRARY(stand_in, library) {
  library.def("set_schedule(str name, int seed) -> ()", &choose_schedule);
  library.def("set_memory_limit(int device, int bytes) -> ()", &set_memory_limit);
  library.def("pin(int address, int bytes) -> ()", &pin_range);
  library.def("unpin(int address) -> ()", &unpin_range);
  library.def("refuse_pinned(int after) -> ()", &refuse_pinned);
  library.def("refuse_communicators(int after) -> ()", &refuse_communicators);
  library.def("device_count() -> int", [] { return std::int64_t{kDeviceCount}; });
  library.def("seed(int device, int seed) -> ()", &seed);
  library.def("random_state(int device) -> Tensor", &random_state);
  library.def("set_random_state(int device, Tensor state) -> ()", &set_random_state);
  library.def("pinned_bytes() -> int", &count_pinned);
  library.def("pageable_copies() -> int", &pageable_copies);
}

}  // namespace stand_in
