#include "tensors.h"

#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>

namespace simulated {
namespace {

constexpr c10::DispatchKeySet kDeviceKey(c10::DispatchKey::PrivateUse1);
constexpr c10::DispatchKeySet kHostKey(c10::DispatchKey::CPU);

// Resizable, so that an operator can make an `out` argument larger; it then has other memory than the device's tensor.
c10::Storage host_storage(const c10::Storage& of_device) {
  auto* owner = new c10::Storage(of_device);
  auto release = [](void* storage) { delete static_cast<c10::Storage*>(storage); };
  c10::DataPtr data(of_device.mutable_data(), owner, release, c10::Device(c10::kCPU));
  return {c10::Storage::use_byte_size_t(), of_device.nbytes(), std::move(data), c10::GetCPUAllocator(), true};
}

// The layout of one tensor, in the memory of another.
at::Tensor in_storage(const at::Tensor& layout, c10::Storage storage, c10::DispatchKeySet key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), key, layout.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(layout.sizes(), layout.strides(), layout.storage_offset());
  return tensor;
}

at::Tensor adopted(const at::Tensor& of_cpu, c10::DeviceIndex device) {
  const auto& storage = of_cpu.storage();
  c10::Storage memory(
      c10::Storage::use_byte_size_t(), storage.nbytes(), device_memory().adopt(storage, device), &device_memory(), true);
  return in_storage(of_cpu, std::move(memory), kDeviceKey);
}

at::Tensor sparse_of(const at::Tensor& sparse, const at::Tensor& indices, const at::Tensor& values) {
  return at::_sparse_coo_tensor_unsafe(
      indices, values, sparse.sizes(), values.options().layout(c10::kSparse), sparse.is_coalesced());
}

at::SparseTensorImpl* sparse_impl(const at::Tensor& sparse) {
  return static_cast<at::SparseTensorImpl*>(sparse.unsafeGetTensorImpl());
}

bool same_block(const at::Tensor& a, const at::Tensor& b) {
  return a.data_ptr() == b.data_ptr() && a.sizes() == b.sizes();
}

}  // namespace

at::Tensor host_view(const at::Tensor& of_device) {
  return in_storage(of_device, host_storage(of_device.storage()), kHostKey);
}

at::Tensor to_device(const at::Tensor& of_cpu, c10::DeviceIndex device) {
  return of_cpu.defined() ? adopted(of_cpu, device) : of_cpu;
}

at::Tensor HostArguments::view(const at::Tensor& argument) {
  if (!on_device(argument)) return argument;
  arguments_.push_back({argument, argument.is_sparse() ? sparse_view(argument) : dense_view(argument)});
  return arguments_.back().on_host;
}

at::Tensor HostArguments::dense_view(const at::Tensor& of_device) {
  const auto& storage = of_device.storage();
  auto known = on_host_.find(storage.unsafeGetStorageImpl());
  if (known == on_host_.end()) {
    known = on_host_.emplace(storage.unsafeGetStorageImpl(), host_storage(storage)).first;
  }
  return in_storage(of_device, known->second, kHostKey);
}

at::Tensor HostArguments::sparse_view(const at::Tensor& of_device) {
  return sparse_of(of_device, dense_view(of_device._indices()), dense_view(of_device._values()));
}

bool HostArguments::any_sparse() const {
  return std::any_of(arguments_.begin(), arguments_.end(), [](const auto& a) { return a.on_host.is_sparse(); });
}

void HostArguments::write_back_resized() {
  for (const auto& argument : arguments_) {
    argument.on_host.is_sparse() ? write_back_sparse(argument) : write_back_dense(argument);
  }
}

void HostArguments::write_back_dense(const Argument& argument) {
  const auto& [of_device, on_host] = argument;
  const bool same_memory = of_device.storage().data() == on_host.storage().data();
  if (same_memory && of_device.sizes() == on_host.sizes()) return;
  at::native::resize_(of_device, on_host.sizes());
  host_view(of_device).copy_(on_host);
}

void HostArguments::write_back_sparse(const Argument& argument) {
  const auto device = argument.of_device.device().index();
  auto* impl = sparse_impl(argument.of_device);
  auto* host = sparse_impl(argument.on_host);
  const bool same_memory = same_block(impl->indices(), host->indices()) && same_block(impl->values(), host->values());
  if (same_memory && impl->coalesced() == host->coalesced()) return;
  if (host->sparse_dim() != impl->sparse_dim() || argument.on_host.sizes() != argument.of_device.sizes()) {
    impl->raw_resize_(host->sparse_dim(), host->dense_dim(), argument.on_host.sizes());
  }
  impl->set_indices_and_values_unsafe(
      dense_result(host->indices(), device), dense_result(host->values(), device));
  impl->set_coalesced(host->coalesced());
}

std::optional<c10::Storage> HostArguments::storage_on_device(const c10::Storage& on_host) const {
  for (const auto& [of_device, known] : on_host_) {
    if (known.is_alias_of(on_host)) return c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(of_device));
  }
  return std::nullopt;
}

at::Tensor HostArguments::result(const at::Tensor& of_cpu, c10::DeviceIndex device) {
  if (!of_cpu.defined() || !of_cpu.is_cpu()) return of_cpu;
  for (const auto& argument : arguments_) {
    if (of_cpu.is_same(argument.on_host)) return argument.of_device;
  }
  if (!of_cpu.is_sparse()) return dense_result(of_cpu, device);
  return sparse_of(of_cpu, dense_result(of_cpu._indices(), device), dense_result(of_cpu._values(), device));
}

at::Tensor HostArguments::dense_result(const at::Tensor& of_cpu, c10::DeviceIndex device) {
  if (auto storage = storage_on_device(of_cpu.storage())) return in_storage(of_cpu, *storage, kDeviceKey);
  return adopted(of_cpu, device);
}

namespace {

using c10::IntArrayRef;
using c10::SymIntArrayRef;

at::Tensor empty(
    IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_memory(), kDeviceKey, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_memory(), kDeviceKey, c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, std::move(offset));
}

at::Tensor view(const at::Tensor& self, SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize(const at::Tensor& self, SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source) {
  return at::native::set_(self, std::move(source));
}

at::Tensor& set_part_of_storage(
    at::Tensor& self, c10::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::cpu::set_(self, std::move(source), offset, size, stride);
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_memory().allocate(0), &device_memory(), true);
  return at::cpu::set_(self, std::move(none), 0, {0}, {1});
}

void record_stream(at::Tensor&, c10::Stream) {}  // kernels are done before memory can be freed

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", simulated::view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("resize_", resize);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_part_of_storage);
  library.impl("set_", set_nothing);
  library.impl("record_stream", record_stream);
}

}  // namespace
}  // namespace simulated
