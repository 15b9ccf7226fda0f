#pragma once

namespace simulated {

// Tells torch that the device is there, and where its generators and its pinned memory are.
void register_hooks();

}  // namespace simulated
