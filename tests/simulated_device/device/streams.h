// The threads' current device and streams, as CUDA keeps them.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <compare>

namespace simulated {

constexpr auto kSimulated = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDeviceCount = 2;

struct StreamKey {
  c10::DeviceIndex device;
  c10::StreamId stream;

  auto operator<=>(const StreamKey&) const = default;
};

inline StreamKey key_of(const c10::Stream& stream) {
  return {stream.device_index(), stream.id()};
}

c10::DeviceIndex current_device();

// Throws for a device that does not exist. Index -1 leaves the current device as it is.
void set_current_device(c10::DeviceIndex index);

// The device itself, or the current one for index -1.
c10::DeviceIndex or_current(c10::DeviceIndex index);

StreamKey current_stream(c10::DeviceIndex device);
void set_current_stream(StreamKey stream);

}  // namespace simulated
