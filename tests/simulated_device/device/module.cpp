// What Python sees of the device beside torch's own interfaces. The tensors' interfaces are in simulated.py.
#include "generator.h"
#include "hooks.h"
#include "host_waits.h"
#include "memory.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;
using namespace simulated;

namespace {

// Leaked, as threads may still wait when the interpreter ends.
py::function& kept(py::function function) {
  return *new py::function(std::move(function));
}

void connect(py::function on_wait, py::function caller) {
  auto& listener = kept(std::move(on_wait));
  auto& finder = kept(std::move(caller));
  set_python(
      [&listener](const HostWait& wait) {
        py::gil_scoped_acquire gil;
        listener(wait.kind, wait.detail, int(wait.device), wait.stream, wait.waited_for, wait.already_done);
      },
      [&finder] {
        py::gil_scoped_acquire gil;
        return finder().cast<std::string>();
      });
  register_hooks();
}

py::dict pinned_stats() {
  const auto stats = pinned_memory().stats();
  return py::dict(
      py::arg("bytes") = stats.bytes, py::arg("allocations") = stats.allocations,
      py::arg("freed_under_copy") = stats.freed_under_copy);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("connect", &connect);
  module.def("device_count", [] { return int(kDeviceCount); });
  module.def("newest_sequence", [] { return timeline().newest(); });
  module.def("take_violations", [] { return timeline().take_violations(); });
  module.def("pinned_stats", &pinned_stats);
  module.def("default_generator", [](int device) { return default_generator(c10::DeviceIndex(device)); });
}
