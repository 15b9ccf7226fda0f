// Sparse tensors of the device: torch's own structure around two dense tensors of the device; all else on the host.
#include "fallback.h"

#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <torch/library.h>

namespace simulated {
namespace {

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, library) {
  library.impl("_sparse_coo_tensor_with_dims", at::native::new_with_dims_sparse);
  library.impl("_sparse_coo_tensor_with_dims_and_tensors", at::native::new_with_dims_and_tensor_sparse_symint);
  library.impl("empty.memory_format", at::native::empty_sparse_symint);
  library.impl("sparse_dim", at::native::sparse_dim_sparse);
  library.impl("dense_dim", at::native::dense_dim_sparse);
  library.impl("_nnz", at::native::_nnz_sparse);
  library.impl("is_coalesced", at::native::is_coalesced_sparse);
  library.impl("_coalesced_", at::native::_coalesced_sparse_);
  library.impl("_indices", at::native::_indices_sparse);
  library.impl("_values", at::native::_values_sparse);
  library.impl("indices", at::native::indices_sparse);
  library.impl("values", at::native::values_sparse);
  library.impl("copy_", at::native::copy_sparse_wrapper_);
  library.impl("copy_sparse_to_sparse_", at::native::copy_sparse_);
}

}  // namespace
}  // namespace simulated
