// Tensors of the device, and the same memory as tensors of the CPU.
#pragma once

#include "streams.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <map>
#include <optional>
#include <vector>

namespace simulated {

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone();
}

// A tensor of the CPU over the memory of a dense tensor of a device.
at::Tensor host_view(const at::Tensor& of_device);

// A tensor of the device with the memory of a dense tensor of the CPU; undefined for an undefined one.
at::Tensor to_device(const at::Tensor& of_cpu, c10::DeviceIndex device);

// The arguments of one operator as tensors of the CPU. Tensors that share memory still do, results that are views of
// an argument become views of the device's tensor, and what the operator resized is resized.
class HostArguments {
 public:
  at::Tensor view(const at::Tensor& argument);
  void write_back_resized();
  at::Tensor result(const at::Tensor& of_cpu, c10::DeviceIndex device);
  bool any_sparse() const;

 private:
  struct Argument {
    at::Tensor of_device;
    at::Tensor on_host;
  };

  at::Tensor dense_view(const at::Tensor& of_device);
  at::Tensor sparse_view(const at::Tensor& of_device);
  void write_back_dense(const Argument& argument);
  void write_back_sparse(const Argument& argument);
  std::optional<c10::Storage> storage_on_device(const c10::Storage& on_host) const;
  at::Tensor dense_result(const at::Tensor& of_cpu, c10::DeviceIndex device);

  std::vector<Argument> arguments_;
  std::map<c10::StorageImpl*, c10::Storage> on_host_;  // by the device's storage
};

}  // namespace simulated
