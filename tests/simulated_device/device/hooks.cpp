#include "hooks.h"

#include "generator.h"
#include "memory.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <algorithm>
#include <cstring>

namespace simulated {
namespace {

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }

  c10::DeviceIndex deviceCount() const override { return kDeviceCount; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device();
    set_current_device(device);
    return before;
  }

  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }

  at::Device getDeviceFromPtr(void*) const override { return {kSimulated, current_device()}; }

  bool isPinnedPtr(const void* pointer) const override { return pinned_memory().contains(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = device_memory().allocate(size);
    std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

}  // namespace

void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

}  // namespace simulated
