// What torch asks a device for through its guards: the current device, streams and events.
#include "host_waits.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

namespace simulated {
namespace {

// An event stands for what was queued on its stream when it was recorded.
struct Event {
  StreamKey stream;
  Sequence upto;
};

c10::Stream as_stream(StreamKey key) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSimulated, key.device), key.stream);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kSimulated; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDeviceCount; }

  c10::Device getDevice() const override { return {kSimulated, current_device()}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { set_current_device(device.index()); }

  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    return as_stream(current_stream(or_current(device.index())));
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_stream({or_current(device.index()), 0});
  }

  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> count = 0;
    return as_stream({or_current(device.index()), ++count});
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    set_current_stream(key_of(stream));
    return before;
  }

  bool queryStream(const c10::Stream& stream) const override {
    const auto key = key_of(stream);
    return timeline().poll(key, timeline().newest(key));
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    const auto key = key_of(stream);
    host_waits("stream", "", key, timeline().newest(key));
  }

  void synchronizeDevice(c10::DeviceIndex device) const override { host_waits_for_device(or_current(device)); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex device, c10::EventFlag) const override {
    TORCH_CHECK(
        device == -1 || device == stream.device_index(), "an event of simulated:", int(device),
        " cannot be recorded on a stream of simulated:", int(stream.device_index()));
    const auto key = key_of(stream);
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {key, timeline().newest(key)};
  }

  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;  // never recorded: nothing to wait for
    const auto& recorded = *static_cast<Event*>(event);
    timeline().queue_wait(key_of(stream), recorded.stream, recorded.upto);
  }

  bool queryEvent(void* event) const override {
    if (!event) return true;
    const auto& recorded = *static_cast<Event*>(event);
    return timeline().poll(recorded.stream, recorded.upto);
  }

  void synchronizeEvent(void* event) const override {
    if (!event) return;
    const auto& recorded = *static_cast<Event*>(event);
    host_waits("event", "", recorded.stream, recorded.upto);
  }

  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

  // A millisecond for each thing that was queued between the two.
  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    const auto& first = *static_cast<Event*>(start);
    const auto& last = *static_cast<Event*>(end);
    TORCH_CHECK(
        timeline().is_done(first.stream, first.upto) && timeline().is_done(last.stream, last.upto),
        "both events must be completed before their elapsed time is known");
    return static_cast<double>(last.upto) - static_cast<double>(first.upto);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace
}  // namespace simulated
