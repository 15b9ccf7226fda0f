// Copies between the host and the devices, with CUDA's rules about which of them the host waits for.
#include "host_waits.h"
#include "memory.h"
#include "tensors.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstring>
#include <sstream>

namespace simulated {
namespace {

std::string described(const at::Tensor& source, const std::string& to) {
  std::ostringstream text;
  text << source.scalar_type() << source.sizes() << " to " << to;
  return text.str();
}

// Whether the bytes can be copied as they lie in memory.
bool is_one_block(const at::Tensor& source, const at::Tensor& target) {
  if (source.scalar_type() != target.scalar_type() || source.sizes() != target.sizes()) return false;
  if (source.is_contiguous() && target.is_contiguous()) return true;
  return source.strides() == target.strides() && source.is_non_overlapping_and_dense();
}

void copy_block_to_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const auto stream = current_stream(source.device().index());
  const bool pinned = pinned_memory().contains(target.data_ptr());
  if (non_blocking && pinned) {
    timeline().queue_copy_to_pinned(stream, target.data_ptr(), source.data_ptr(), source.nbytes());
    return;
  }
  host_waits("copy", described(source, pinned ? "pinned memory" : "host memory"), stream, timeline().queue_kernel(stream));
  std::memcpy(target.data_ptr(), source.data_ptr(), source.nbytes());
}

void copy_block_to_device(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const auto stream = current_stream(target.device().index());
  if (non_blocking && pinned_memory().contains(source.data_ptr())) {
    timeline().queue_copy_from_pinned(
        stream, target.data_ptr(), source.data_ptr(), source.nbytes(), python_caller());
    return;
  }
  // With non_blocking, CUDA first copies pageable memory to memory of its own, and waits for nothing.
  const auto copy = timeline().queue_kernel(stream);
  if (!non_blocking) host_waits("copy", described(source, "the device"), stream, copy);
  std::memcpy(target.data_ptr(), source.data_ptr(), source.nbytes());
}

void copy_block(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (source.numel() == 0) return;
  on_device(source) ? copy_block_to_host(source, target, non_blocking)
                    : copy_block_to_device(source, target, non_blocking);
}

// As at::native::copy_kernel_cuda: the device converts and makes contiguous if the copy does not block, so that the
// part that crosses over is one block; else the host does.
void copy_across(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (is_one_block(source, target)) return copy_block(source, target, non_blocking);
  const bool source_converts = on_device(source) == non_blocking;
  const auto dtype = source_converts ? target.scalar_type() : source.scalar_type();
  const auto source_block = source.to(dtype).expand_as(target).contiguous();
  const bool direct = target.is_contiguous() && target.scalar_type() == dtype;
  const auto target_block = direct ? target : at::empty(target.sizes(), target.options().dtype(dtype));
  copy_block(source_block, target_block, non_blocking);
  if (!direct) target.copy_(target_block, non_blocking);
}

// Two devices wait for each other, as with CUDA; the host waits for neither.
void copy_on_devices(const at::Tensor& source, const at::Tensor& target) {
  const auto from = current_stream(source.device().index()), to = current_stream(target.device().index());
  if (from != to) timeline().queue_wait(from, to, timeline().newest(to));
  const auto copy = timeline().queue_kernel(from);
  if (from != to) timeline().queue_wait(to, from, copy);
  host_view(target).copy_(host_view(source));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (on_device(source) && on_device(target)) {
    copy_on_devices(source, target);
  } else {
    copy_across(source, target, non_blocking);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, /*non_blocking=*/false);
}

c10::Scalar local_scalar(const at::Tensor& self) {
  const auto stream = current_stream(self.device().index());
  host_waits("item", described(self, "a number"), stream, timeline().queue_kernel(stream));
  return at::_local_scalar_dense(host_view(self));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
}

}  // namespace
}  // namespace simulated
