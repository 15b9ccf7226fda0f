// Operators that a device must have of its own: torch has no kernel of the CPU under their names.
#include "fallback.h"
#include "generator.h"
#include "tensors.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

namespace simulated {
namespace {

using at::Tensor;
using c10::SymIntArrayRef;
using OptionalTensor = std::optional<Tensor>;

OptionalTensor optional_host_view(const OptionalTensor& tensor) {
  return tensor && tensor->defined() ? OptionalTensor(host_view(*tensor)) : std::nullopt;
}

Tensor host_view_or_zeros(const OptionalTensor& tensor, const Tensor& like) {
  return optional_host_view(tensor).value_or(at::zeros_like(like));
}

// Queues the kernel; what is computed in its scope is not recorded by autograd.
struct Kernel {
  explicit Kernel(const Tensor& argument) : device(argument.device().index()) { launch(device); }

  Tensor result(const Tensor& of_cpu) const { return to_device(of_cpu, device); }

  c10::DeviceIndex device;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
};

Tensor convolution(
    const Tensor& input, const Tensor& weight, const OptionalTensor& bias, SymIntArrayRef stride, SymIntArrayRef padding,
    SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding, c10::SymInt groups) {
  Kernel kernel(input);
  return kernel.result(at::convolution_symint(
      host_view(input), host_view(weight), optional_host_view(bias), stride, padding, dilation, transposed,
      output_padding, std::move(groups)));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, SymIntArrayRef stride, SymIntArrayRef padding,
    SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> wanted) {
  Kernel kernel(input);
  const c10::SymInt bias_size = transposed ? weight.sym_size(1) * groups : weight.sym_size(0);
  auto [grad_input, grad_weight, grad_bias] = at::convolution_backward_symint(
      host_view(grad), host_view(input), host_view(weight), SymIntArrayRef(bias_size), stride, padding, dilation,
      transposed, output_padding, groups, wanted);
  return {kernel.result(grad_input), kernel.result(grad_weight), kernel.result(grad_bias)};
}

// The CPU's native_dropout takes no generator.
std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, std::optional<bool> train) {
  Kernel kernel(input);
  const auto values = host_view(input);
  if (p == 0 || !train.value_or(true) || input.numel() == 0) {
    return {kernel.result(values.clone()), kernel.result(at::ones_like(values, c10::kBool))};
  }
  auto mask = at::empty_like(values, c10::kBool);
  mask.bernoulli_(1 - p, host_generator(default_generator(kernel.device)));
  const double scale = p == 1 ? 0 : 1 / (1 - p);
  return {kernel.result(values.mul(mask).mul_(scale)), kernel.result(mask)};
}

Tensor sum_of_gates(const Tensor& gates, const OptionalTensor& bias) {
  const auto sum = host_view(gates);
  return bias && bias->defined() ? sum + host_view(*bias) : sum;
}

// Gates in torch's order: input, forget, cell, output. The workspace holds them as they are after their functions.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  Kernel kernel(cx);
  const auto gates = (sum_of_gates(input_gates, input_bias) + sum_of_gates(hidden_gates, hidden_bias)).chunk(4, 1);
  const auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  const auto cy = forget * host_view(cx) + in * cell;
  const auto hy = out * cy.tanh();
  return {kernel.result(hy), kernel.result(cy), kernel.result(at::cat({in, forget, cell, out}, 1))};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const OptionalTensor& grad_hy, const OptionalTensor& grad_cy, const Tensor& cx, const Tensor& cy,
    const Tensor& workspace, bool has_bias) {
  Kernel kernel(cx);
  const auto cells = host_view(cx), tanh_cy = host_view(cy).tanh();
  const auto gates = host_view(workspace).chunk(4, 1);
  const auto &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const auto grad_hidden = host_view_or_zeros(grad_hy, cells);
  const auto grad_cell = host_view_or_zeros(grad_cy, cells) + grad_hidden * out * (1 - tanh_cy * tanh_cy);
  const auto grad_gates = at::cat(
      {grad_cell * cell * in * (1 - in), grad_cell * cells * forget * (1 - forget), grad_cell * in * (1 - cell * cell),
       grad_hidden * tanh_cy * out * (1 - out)},
      1);
  const auto grad_bias = has_bias ? grad_gates.sum(0) : Tensor();
  return {kernel.result(grad_gates), kernel.result(grad_cell * forget), kernel.result(grad_bias)};
}

// Gates in torch's order: reset, update, new.
std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  Kernel kernel(hx);
  const auto input = sum_of_gates(input_gates, input_bias).chunk(3, 1);
  const auto hidden = sum_of_gates(hidden_gates, hidden_bias).chunk(3, 1);
  const auto state = host_view(hx);
  const auto reset = (input[0] + hidden[0]).sigmoid(), update = (input[1] + hidden[1]).sigmoid();
  const auto fresh = (input[2] + reset * hidden[2]).tanh();
  const auto workspace = at::cat({reset, update, fresh, state, hidden[2]}, 1);
  return {kernel.result(fresh + update * (state - fresh)), kernel.result(workspace)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  Kernel kernel(grad_hy);
  const auto grad = host_view(grad_hy);
  const auto kept = host_view(workspace).chunk(5, 1);
  const auto &reset = kept[0], &update = kept[1], &fresh = kept[2], &state = kept[3], &hidden = kept[4];
  const auto grad_fresh = grad * (1 - update) * (1 - fresh * fresh);
  const auto grad_update = grad * (state - fresh) * update * (1 - update);
  const auto grad_reset = grad_fresh * hidden * reset * (1 - reset);
  const auto grad_input = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  const auto grad_hidden = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  return {
      kernel.result(grad_input), kernel.result(grad_hidden), kernel.result(grad * update),
      kernel.result(has_bias ? grad_input.sum(0) : Tensor()), kernel.result(has_bias ? grad_hidden.sum(0) : Tensor())};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
  library.impl("native_dropout", dropout);
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace
}  // namespace simulated
