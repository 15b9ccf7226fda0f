#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include <vector>

namespace simulated {
namespace {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(c10::DeviceIndex device)
      : DeviceGenerator(device, at::detail::createCPUGenerator(c10::default_rng_seed_val)) {}

  DeviceGenerator(c10::DeviceIndex device, at::Generator host)
      : GeneratorImpl({kSimulated, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), host(std::move(host)) {}

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }

  void set_offset(uint64_t) override { TORCH_CHECK(false, "a simulated device's generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "a simulated device's generator has no offset"); }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.get_state().getIntrusivePtr(); }

  void set_state(const c10::TensorImpl& state) override {
    auto* borrowed = const_cast<c10::TensorImpl*>(&state);
    host.set_state(at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(borrowed)));
  }

  static c10::DeviceType device_type() { return kSimulated; }

  at::Generator host;

 private:
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device().index(), host.clone()); }
};

std::vector<at::Generator> one_for_each_device() {
  std::vector<at::Generator> generators;
  for (c10::DeviceIndex device = 0; device < kDeviceCount; device++) generators.push_back(new_generator(device));
  return generators;
}

}  // namespace

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(or_current(device));
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto* generators = new std::vector<at::Generator>(one_for_each_device());
  return generators->at(or_current(device));
}

at::Generator host_generator(const at::Generator& of_device) {
  return of_device.get<DeviceGenerator>()->host;
}

}  // namespace simulated
