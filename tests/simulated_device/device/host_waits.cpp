#include "host_waits.h"

namespace simulated {
namespace {

WaitListener listener_of_waits;
CallerFinder finder_of_caller;

}  // namespace

void set_python(WaitListener listener, CallerFinder caller) {
  listener_of_waits = std::move(listener);
  finder_of_caller = std::move(caller);
}

std::string python_caller() {
  return finder_of_caller();
}

void host_waits(const char* kind, const std::string& detail, StreamKey stream, Sequence upto) {
  listener_of_waits({kind, detail, stream.device, stream.stream, upto, timeline().is_done(stream, upto)});
  timeline().finish(stream, upto);
}

void host_waits_for_device(c10::DeviceIndex device) {
  listener_of_waits({"device", "", device, -1, timeline().newest(device), timeline().is_done(device)});
  timeline().finish(device);
}

}  // namespace simulated
