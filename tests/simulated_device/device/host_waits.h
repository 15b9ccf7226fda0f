// The host's waits: each is reported to Python, and then lets the device come on.
#pragma once

#include "timeline.h"

#include <functional>
#include <string>

namespace simulated {

struct HostWait {
  std::string kind;    // "event", "stream", "device", "copy", "item" or "data"
  std::string detail;  // what was copied, or the operator that needs to know its data
  c10::DeviceIndex device;
  c10::StreamId stream;  // -1 for a wait for the whole device
  Sequence waited_for;
  bool already_done;
};

// Take Python's lock themselves. Never called with another lock held.
using WaitListener = std::function<void(const HostWait&)>;
using CallerFinder = std::function<std::string()>;

// Called once, when the module is loaded.
void set_python(WaitListener listener, CallerFinder caller);

// The Python line that called into torch, or that there is none in this thread.
std::string python_caller();

// `kind` and `detail` are those of HostWait.
void host_waits(const char* kind, const std::string& detail, StreamKey stream, Sequence upto);
void host_waits_for_device(c10::DeviceIndex device);

}  // namespace simulated
