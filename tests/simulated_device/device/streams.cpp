#include "streams.h"

#include <c10/util/Exception.h>

#include <array>

namespace simulated {
namespace {

thread_local c10::DeviceIndex device_of_thread = 0;
thread_local std::array<c10::StreamId, kDeviceCount> streams_of_thread{};

}  // namespace

c10::DeviceIndex current_device() {
  return device_of_thread;
}

void set_current_device(c10::DeviceIndex index) {
  TORCH_CHECK(index < kDeviceCount, "simulated:", int(index), " does not exist; there are ", int(kDeviceCount));
  device_of_thread = or_current(index);
}

c10::DeviceIndex or_current(c10::DeviceIndex index) {
  return index < 0 ? device_of_thread : index;
}

StreamKey current_stream(c10::DeviceIndex device) {
  return {device, streams_of_thread.at(device)};
}

void set_current_stream(StreamKey stream) {
  streams_of_thread.at(stream.device) = stream.stream;
}

}  // namespace simulated
