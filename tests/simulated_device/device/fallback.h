// Runs what has no kernel of its own here with the CPU's kernels, in the device's memory.
#pragma once

#include "streams.h"
#include "timeline.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace simulated {

// A boxed kernel for any operator.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Queues a kernel on the current stream of a device.
Sequence launch(c10::DeviceIndex device);

}  // namespace simulated
