// What torch asks of a device: guard, hooks, generator.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

#include "allocator.h"
#include "generator.h"
#include "pinned.h"

namespace stand_in {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

Device torch_device(int index) {
  return {DeviceType::PrivateUse1, static_cast<DeviceIndex>(index)};
}

int index_of(Device device) { return device.has_index() ? device.index() : current_device(); }

int checked(int index) {
  TORCH_CHECK(index >= 0 && index < kDeviceCount, "stand_in: device ", index, " of ", kDeviceCount);
  return index;
}

c10::Stream torch_stream(int device, std::int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, torch_device(device), id);
}

Stream& unpack(const c10::Stream& stream) { return stream_of(stream.device_index(), stream.id()); }

// What a c10::Event points to.
using Event = std::shared_ptr<Recording>;

Event& event_at(void* event) { return *static_cast<Event*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::PrivateUse1; }
  Device exchangeDevice(Device device) const override {
    return torch_device(exchange_device(checked(device.index())));
  }
  Device getDevice() const override { return torch_device(current_device()); }
  void setDevice(Device device) const override { exchange_device(checked(device.index())); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDeviceCount) {
      exchange_device(device.index());
    }
  }
  DeviceIndex deviceCount() const noexcept override { return kDeviceCount; }

  c10::Stream getStream(Device device) const override {
    const int index = index_of(device);
    return torch_stream(index, current_stream(index).id());
  }
  c10::Stream getDefaultStream(Device device) const override {
    return torch_stream(index_of(device), 0);
  }
  c10::Stream getNewStream(Device device, int /*priority*/) const override {
    const int index = index_of(device);
    return torch_stream(index, next_stream(index));
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool /*high_priority*/) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return torch_stream(stream.device_index(), exchange_stream(stream.device_index(), stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &unpack(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    Stream& asked = unpack(stream);
    return asked.poll(asked.ticket());
  }
  void synchronizeStream(const c10::Stream& stream) const override { unpack(stream).drain(); }
  void synchronizeDevice(const DeviceIndex device) const override { drain_device(device); }

  void record(void** event, const c10::Stream& stream, const DeviceIndex /*device*/,
              const c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) {
      *event = std::make_unique<Event>().release();  // destroyEvent takes it back
    }
    event_at(*event) = stand_in::record(unpack(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      wait_for(unpack(stream), event_at(event));
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || event_at(event)->stream->poll(event_at(event)->ticket);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      event_at(event)->stream->await(event_at(event)->ticket);
    }
  }
  void destroyEvent(void* event, const DeviceIndex /*device*/) const noexcept override {
    const std::unique_ptr<Event> owned(static_cast<Event*>(event));
  }
  double elapsedTime(void* from, void* to, const DeviceIndex /*device*/) const override {
    synchronizeEvent(from);
    synchronizeEvent(to);
    return std::chrono::duration<double, std::milli>(event_at(to)->time - event_at(from)->time)
        .count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer,
                             const c10::Stream& stream) const override {
    DeviceMemory::get().recordStream(pointer, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex /*device*/) const override { return true; }
  DeviceIndex deviceCount() const override { return kDeviceCount; }
  void setCurrentDevice(DeviceIndex device) const override { exchange_device(checked(device)); }
  DeviceIndex getCurrentDevice() const override {
    return static_cast<DeviceIndex>(current_device());
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return static_cast<DeviceIndex>(exchange_device(checked(device)));
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  Device getDeviceFromPtr(void* address) const override {
    const int index = device_of(address);
    TORCH_CHECK(index >= 0, "stand_in: ", address, " is not device memory");
    return torch_device(index);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<DeviceGenerator>(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    auto* const self = storage.unsafeGetStorageImpl();
    TORCH_CHECK(self->resizable(), "Trying to resize storage that is not resizable");
    const OnDevice guard(self->device());
    c10::DataPtr fresh = DeviceMemory::get().allocate(bytes);
    const std::size_t kept = std::min(bytes, self->nbytes());
    if (kept > 0) {
      DeviceMemory::get().copy_data(fresh.get(), self->data(), kept);
    }
    self->set_data_ptr_noswap(std::move(fresh));
    self->set_nbytes(bytes);
  }
};

}  // namespace

at::Generator& default_generator(int device) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int index = 0; index < kDeviceCount; ++index) {
      made.push_back(at::make_generator<DeviceGenerator>(index));
    }
    return made;
  }();
  return generators.at(static_cast<std::size_t>(checked(device)));
}

namespace {

const bool registered = [] {
  register_device_memory();
  register_pinned_memory();
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace
}  // namespace stand_in
