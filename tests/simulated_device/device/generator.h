// Random numbers of a device: a generator of the CPU for each, apart from the host's own.
#pragma once

#include "streams.h"

#include <ATen/core/Generator.h>

namespace simulated {

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// The generator of the CPU that draws for a generator of a device.
at::Generator host_generator(const at::Generator& of_device);

}  // namespace simulated
