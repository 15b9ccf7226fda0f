#include "fallback.h"

#include "generator.h"
#include "host_waits.h"
#include "tensors.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <functional>
#include <set>

namespace simulated {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;

// The size of their result, or what they return to the host, depends on the data: CUDA waits for it.
const std::set<std::string> kNeedTheirData = {
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_dim_consecutive", "aten::unique_consecutive", "aten::bincount", "aten::equal",
    "aten::repeat_interleave", "aten::_coalesce"};

// Their lengths are on the host: CUDA's kernels copy them to the device first.
const std::set<std::string> kCopyLengths = {"aten::_ctc_loss", "aten::_ctc_loss_backward"};

const std::set<std::string> kWriteIndexed = {"aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};

// Calls `visit` for each tensor of a value, also in lists.
void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor) visit(*tensor);
    }
  }
}

// Replaces each tensor of a value, also in lists.
c10::IValue map_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector()) mapped.push_back(map(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      mapped.push_back(tensor ? std::optional(map(*tensor)) : std::nullopt);
    }
    return mapped;
  }
  return value;
}

// That of the first tensor on a device, else that of a `device` argument, else the current one.
c10::DeviceIndex device_of(Arguments arguments) {
  std::optional<c10::DeviceIndex> of_tensor, asked_for;
  for (const auto& argument : arguments) {
    if (argument.isDevice() && argument.toDevice().type() == kSimulated) asked_for = argument.toDevice().index();
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (on_device(tensor) && !of_tensor) of_tensor = tensor.device().index();
    });
  }
  return or_current(of_tensor.value_or(asked_for.value_or(-1)));
}

// As CUDA's kernels: numbers and indices may be on the host, everything else is on one device.
void check_devices(const std::string& name, Arguments arguments, c10::DeviceIndex device) {
  const bool indexing = name == "aten::index" || kWriteIndexed.count(name);
  for (const auto& argument : arguments) {
    const bool may_be_on_host = indexing && argument.isOptionalTensorList();
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || (tensor.is_cpu() && (tensor.dim() == 0 || may_be_on_host))) return;
      TORCH_CHECK(
          tensor.device() == c10::Device(kSimulated, device), "Expected all tensors to be on the same device, but ",
          name, " got one on ", tensor.device(), " and one on simulated:", int(device));
    });
  }
}

bool is_mask(const at::Tensor& tensor) {
  return tensor.scalar_type() == c10::kBool || tensor.scalar_type() == c10::kByte;
}

// A read with a mask or with indices on the host needs nothing here: torch itself calls nonzero, or copies them.
void wait_for_indices_of_write(Arguments arguments, StreamKey stream, Sequence kernel) {
  // CUDA makes a masked_fill of `x[mask] = 1.0`, which needs no sizes. (A number on the device would wait there; it
  // cannot be told here, as torch puts the number on the device before.)
  if (arguments[2].toTensor().numel() == 1) return;
  for_each_tensor(arguments[1], [&](const at::Tensor& index) {
    if (is_mask(index)) {
      host_waits("data", "a write with a mask", stream, kernel);
    } else if (index.is_cpu()) {
      host_waits("copy", "indices on the host to the device", stream, kernel);
    }
  });
}

// where() copies a number that is a tensor of the host to the device first.
void wait_for_numbers_of_where(Arguments arguments, StreamKey stream, Sequence kernel) {
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (tensor.is_cpu()) host_waits("copy", "a number on the host to the device, for where", stream, kernel);
    });
  }
}

void wait_as_cuda_does(const std::string& name, Arguments arguments, StreamKey stream, Sequence kernel) {
  if (kNeedTheirData.count(name)) host_waits("data", name, stream, kernel);
  if (kCopyLengths.count(name)) host_waits("copy", "lengths of " + name + " to the device", stream, kernel);
  if (kWriteIndexed.count(name)) wait_for_indices_of_write(arguments, stream, kernel);
  if (name == "aten::where") wait_for_numbers_of_where(arguments, stream, kernel);
}

at::Generator generator_to_draw_from(const std::string& name, const c10::IValue& given, c10::DeviceIndex device) {
  if (given.isNone()) return host_generator(default_generator(device));
  const auto generator = given.toGenerator();
  TORCH_CHECK(
      generator.device().type() == kSimulated, name, ": expected a generator of the simulated device, but it is of ",
      generator.device());
  return host_generator(generator);
}

// Draws come from the device's generator.
void set_generator(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::DeviceIndex device) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return;
  const auto& schema = op.schema();
  const auto index = schema.argumentIndexWithName("generator");
  TORCH_CHECK_NOT_IMPLEMENTED(
      index, schema.name(), " draws from the CPU's generator; give it a kernel in tests/simulated_device/device");
  auto& argument = torch::jit::peek(*stack, *index, schema.arguments().size());
  argument = generator_to_draw_from(schema.name(), argument, device);
}

c10::IValue on_host(const c10::IValue& argument, HostArguments& views) {
  if (argument.isDevice()) return c10::Device(c10::kCPU);
  return map_tensors(argument, [&](const at::Tensor& tensor) { return views.view(tensor); });
}

}  // namespace

Sequence launch(c10::DeviceIndex device) {
  return timeline().queue_kernel(current_stream(device));
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto given = torch::jit::last(*stack, schema.arguments().size());
  const auto device = device_of(given);
  check_devices(schema.name(), given, device);

  c10::DeviceGuard guard(c10::Device(kSimulated, device));
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  wait_as_cuda_does(schema.name(), given, current_stream(device), launch(device));

  set_generator(op, stack, device);
  HostArguments views;
  for (size_t index = stack->size() - schema.arguments().size(); index < stack->size(); index++) {
    (*stack)[index] = on_host((*stack)[index], views);
  }
  op.redispatchBoxed(
      c10::DispatchKeySet(views.any_sparse() ? c10::DispatchKey::SparseCPU : c10::DispatchKey::CPU), stack);
  views.write_back_resized();
  for (size_t index = stack->size() - schema.returns().size(); index < stack->size(); index++) {
    auto& result = (*stack)[index];
    result = map_tensors(result, [&](const at::Tensor& tensor) { return views.result(tensor, device); });
  }
}

namespace {

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace
}  // namespace simulated
