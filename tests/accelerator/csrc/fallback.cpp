#include "fallback.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <unordered_map>

#include "allocator.h"
#include "generator.h"

namespace stand_in {
namespace {

void release_storage(void* kept) {
  const std::unique_ptr<c10::Storage> owned(static_cast<c10::Storage*>(kept));
}

// The tensors of one call under their two names.
class Aliases {
 public:
  at::Tensor alias(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_privateuseone()) {
      return tensor;
    }
    device_ = tensor.device();
    has_device_ = true;
    const c10::Storage& storage = tensor.storage();
    auto& entry = aliases_[storage.unsafeGetStorageImpl()];
    if (!entry.host) {
      entry = {storage, open_storage(storage), tensor.key_set()};
    }
    at::Tensor host = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(entry.host), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                      tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      host.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    pairs_.emplace_back(tensor, host);
    return host;
  }

  // The device's tensor for what the op returned: the argument itself, a view of an argument, or a
  // new tensor.
  at::Tensor result(const at::Tensor& host) {
    if (!host.defined() || !host.device().is_cpu() || !has_device_) {
      return host;
    }
    for (const auto& [device, alias] : pairs_) {
      if (alias.is_same(host)) {
        return device;
      }
    }
    for (const auto& [impl, entry] : aliases_) {
      if (host.storage().unsafeGetStorageImpl() == entry.host.unsafeGetStorageImpl()) {
        at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, c10::Storage(entry.device), entry.keys, host.dtype());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(),
                                                          host.storage_offset());
        return view;
      }
    }
    at::Tensor fresh =
        at::empty_strided(host.sizes(), host.strides(), host.options().device(device_));
    if (host.numel() > 0) {
      std::memcpy(open_alias(fresh.const_data_ptr()), host.const_data_ptr(), fresh.nbytes());
    }
    return fresh;
  }

  // An `out` that the op resized has new memory on the host: the device's tensor follows.
  void follow_resized() {
    for (const auto& [device, host] : pairs_) {
      const auto& entry = aliases_.at(device.storage().unsafeGetStorageImpl());
      const bool moved = entry.host.data() != open_alias(device.storage().data());
      if (!moved && host.sizes() == device.sizes() && host.strides() == device.strides()) {
        continue;
      }
      if (moved) {
        device.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
            DeviceMemory::get().allocate(entry.host.nbytes()));
        device.storage().set_nbytes(entry.host.nbytes());
        std::memcpy(open_alias(device.storage().data()), entry.host.data(), entry.host.nbytes());
      }
      device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(),
                                                          host.storage_offset());
    }
  }

  c10::Device device() const { return device_; }

 private:
  struct Entry {
    c10::Storage device;
    c10::Storage host;
    c10::DispatchKeySet keys;  // a view has its base's
  };

  // Whoever keeps the alias keeps the device's memory.
  static c10::Storage open_storage(const c10::Storage& storage) {
    auto kept = std::make_unique<c10::Storage>(storage);
    void* const address = storage.data() == nullptr ? nullptr : open_alias(storage.data());
    c10::DataPtr pointer(address, kept.release(), &release_storage,
                         c10::Device(c10::DeviceType::CPU));
    return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                 storage.nbytes(), std::move(pointer),
                                                 c10::GetAllocator(c10::DeviceType::CPU), true);
  }

  bool has_device_ = false;
  c10::Device device_{c10::DeviceType::PrivateUse1, 0};
  std::unordered_map<c10::StorageImpl*, Entry> aliases_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
};

// Ops run before they return, yet what they wrote must not be there for other streams: it is taken
// away and put back by the stream's own queue.
class LateResults {
 public:
  void add(const at::Tensor& tensor) {
    if (tensor.defined() && tensor.device().is_privateuseone() && tensor.numel() > 0 &&
        tensor.is_non_overlapping_and_dense()) {
      std::byte* const address = open_alias(tensor.const_data_ptr());
      ranges_.push_back({{static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()},
                         {address, address + tensor.nbytes()}});
    }
  }
  void add(const c10::IValue& value) {
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        add(tensor);
      }
    }
  }

  void delay(Stream& stream) {
    std::vector<Range> uses;
    for (const auto& [range, values] : ranges_) {
      std::memset(open_alias(range.begin), kPoison, range.bytes);
      uses.push_back(range);
    }
    stream.enqueue({[kept = std::move(ranges_)] {
                      for (const auto& [range, values] : kept) {
                        std::memcpy(open_alias(range.begin), values.data(), values.size());
                      }
                    },
                    std::move(uses)});
  }
  bool empty() const { return ranges_.empty(); }

 private:
  std::vector<std::pair<Range, std::vector<std::byte>>> ranges_;
};

// Torch's kernels for a device take values of the host as 0-d tensors and as indices, no others.
void check_devices(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                   std::size_t begin) {
  if (op.schema().name().rfind("aten::", 0) != 0) {
    return;
  }
  std::optional<c10::Device> device;
  bool from_host = false;
  const auto look = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.device().is_privateuseone()) {
      device = tensor.device();
    } else if (tensor.defined() && tensor.device().is_cpu() && tensor.dim() > 0) {
      from_host = true;
    }
  };
  for (std::size_t index = begin; index < stack.size(); ++index) {
    if (stack[index].isTensor()) {
      look(stack[index].toTensor());
    } else if (stack[index].isTensorList()) {
      for (const at::Tensor& tensor : stack[index].toTensorVector()) {
        look(tensor);
      }
    }
  }
  TORCH_CHECK(!device.has_value() || !from_host,
              "Expected all tensors to be on the same device, but found at least two devices, ",
              *device, " and cpu! (", op.schema().name(), ")");
}

c10::IValue host_argument(const c10::IValue& value, Aliases& aliases) {
  if (value.isTensor()) {
    return aliases.alias(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> hosts;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      hosts.push_back(aliases.alias(tensor));
    }
    return hosts;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> hosts;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      hosts.push_back(tensor.has_value() ? std::optional(aliases.alias(*tensor)) : std::nullopt);
    }
    return hosts;
  }
  if (value.isDevice() && value.toDevice().is_privateuseone()) {
    return c10::Device(c10::DeviceType::CPU);
  }
  if (value.isGenerator() && value.toGenerator().device().is_privateuseone()) {
    return static_cast<const DeviceGenerator*>(value.toGenerator().unsafeGetGeneratorImpl())
        ->host();
  }
  return value;
}

c10::IValue device_result(const c10::IValue& value, Aliases& aliases) {
  if (value.isTensor()) {
    return aliases.result(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> results;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      results.push_back(aliases.result(tensor));
    }
    return results;
  }
  return value;
}

// Lends the device's random numbers to CPU kernels that draw from the CPU's default generator.
class BorrowedGenerator {
 public:
  explicit BorrowedGenerator(at::Generator& own) : own_(own), before_(host_.get_state()) {
    host_.set_state(own_.get_state());
  }
  ~BorrowedGenerator() {
    own_.set_state(host_.get_state());
    host_.set_state(before_);
  }
  BorrowedGenerator(const BorrowedGenerator&) = delete;
  BorrowedGenerator& operator=(const BorrowedGenerator&) = delete;

 private:
  at::Generator host_ = at::detail::getDefaultCPUGenerator();
  at::Generator& own_;
  at::Tensor before_;
};

bool draws_from_default(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                        std::size_t begin) {
  const auto& tags = op.getTags();
  return std::find(tags.begin(), tags.end(), at::Tag::nondeterministic_seeded) != tags.end() &&
         std::none_of(stack.begin() + static_cast<std::ptrdiff_t>(begin), stack.end(),
                      [](const c10::IValue& value) { return value.isGenerator(); });
}

}  // namespace

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::size_t begin = stack->size() - schema.arguments().size();
  check_devices(op, *stack, begin);
  Aliases aliases;
  torch::jit::Stack written;
  for (std::size_t index = 0; index < schema.arguments().size(); ++index) {
    c10::IValue& value = (*stack)[begin + index];
    const auto* const alias = schema.arguments()[index].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      written.push_back(value);
    }
    value = host_argument(value, aliases);
  }
  const OnDevice guard(aliases.device());
  Stream& stream = current_stream(aliases.device().index());
  stream.drain();
  {
    std::optional<BorrowedGenerator> borrowed;
    if (draws_from_default(op, *stack, begin)) {
      borrowed.emplace(default_generator(aliases.device().index()));
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  aliases.follow_resized();
  const bool late = stream.draw_late_result();
  LateResults results;
  for (std::size_t index = 0; index < schema.returns().size(); ++index) {
    c10::IValue& value = (*stack)[stack->size() - schema.returns().size() + index];
    value = device_result(value, aliases);
    if (late && schema.returns()[index].alias_info() == nullptr) {
      results.add(value);
    }
  }
  for (std::size_t index = 0; late && index < written.size(); ++index) {
    results.add(written[index]);
  }
  if (!results.empty()) {
    results.delay(stream);
  }
}

}  // namespace stand_in
