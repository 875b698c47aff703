// SPDX-License-Identifier: Apache-2.0
#include "ops/layout/layout.hpp"

#include <ATen/Functions.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/WrapDimUtils.h>
#include <torch/csrc/autograd/custom_function.h>

#include <set>
#include <utility>

#include "ops/layout/row_copy.hpp"
#include "ops/tensor_launch.hpp"

namespace ddp::ops::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class ContiguousRows : public torch::autograd::Function<ContiguousRows> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x) {
    ctx->saved_data["strides"] = dense_strides(x);
    return contiguous_copy(x);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_differentiated_once("a permuted copy");
    const at::Tensor grad = std::move(grads[0]);
    const auto strides = ctx->saved_data["strides"].toIntVector();
    if (grad.strides() == at::IntArrayRef(strides)) {
      return {grad};
    }
    const auto grad_x = at::empty_strided(grad.sizes(), strides, grad.options());
    copy_rows(grad_x, grad);
    return {grad_x};
  }
};

// Copies the two halves that a roll of the first dimension makes, and each by the next dimensions.
void copy_rolled(const at::Tensor& to, const at::Tensor& from, at::IntArrayRef shifts,
                 at::IntArrayRef dims) {
  if (dims.empty()) {
    copy_rows(to, from);
    return;
  }
  const int64_t dim = dims[0], size = to.size(dim);
  const int64_t shift = ((shifts[0] % size) + size) % size;
  const auto copy_part = [&](int64_t to_start, int64_t from_start, int64_t length) {
    if (length > 0) {
      copy_rolled(to.narrow(dim, to_start, length), from.narrow(dim, from_start, length),
                  shifts.slice(1), dims.slice(1));
    }
  };
  copy_part(0, size - shift, shift);
  copy_part(shift, 0, size - shift);
}

at::Tensor rolled(const at::Tensor& x, at::IntArrayRef shifts, at::IntArrayRef dims) {
  const auto result = at::empty(x.sizes(), x.options().memory_format(at::MemoryFormat::Contiguous));
  copy_rolled(result, x, shifts, dims);
  return result;
}

class RolledRows : public torch::autograd::Function<RolledRows> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                            const std::vector<int64_t>& shifts, const std::vector<int64_t>& dims) {
    std::vector<int64_t> back;
    for (const int64_t shift : shifts) {
      back.push_back(-shift);
    }
    ctx->saved_data["back"] = back;
    ctx->saved_data["dims"] = dims;
    return rolled(x, shifts, dims);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_differentiated_once("a roll");
    return {rolled(grads[0], ctx->saved_data["back"].toIntVector(),
                   ctx->saved_data["dims"].toIntVector()),
            at::Tensor(), at::Tensor()};
  }
};

class SelectedRows : public torch::autograd::Function<SelectedRows> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, int64_t dim,
                               int64_t count) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["sizes"] = x.sizes().vec();
    ctx->saved_data["strides"] = dense_strides(x);
    ctx->saved_data["dim"] = dim;
    variable_list parts;
    for (int64_t i = 0; i < count; ++i) {
      const at::Tensor part = x.detach().select(dim, i);
      parts.push_back(alias_of(part));
    }
    return parts;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_differentiated_once("select_each");
    at::Tensor whole;
    const auto sizes = ctx->saved_data["sizes"].toIntVector();
    const auto dim = ctx->saved_data["dim"].toInt();
    for (size_t i = 0; i < grads.size(); ++i) {
      if (grads[i].defined()) {
        if (!whole.defined()) {
          whole = at::empty_strided(sizes, ctx->saved_data["strides"].toIntVector(),
                                    grads[i].options());
        }
        copy_rows(whole.select(dim, static_cast<int64_t>(i)), grads[i]);
      }
    }
    for (int64_t i = 0; whole.defined() && i < whole.size(dim); ++i) {
      if (i >= std::ssize(grads) || !grads[static_cast<size_t>(i)].defined()) {
        whole.select(dim, i).zero_();
      }
    }
    return {whole, at::Tensor(), at::Tensor()};
  }
};

// Rolls of one dimension follow each other: they have no common parts.
bool are_distinct(at::IntArrayRef dims, int64_t rank) {
  std::set<int64_t> distinct;
  for (const int64_t dim : dims) {
    distinct.insert(at::maybe_wrap_dim(dim, rank));
  }
  return distinct.size() == dims.size();
}

bool is_recorded(const at::Tensor& x) {
  return at::GradMode::is_enabled() && x.requires_grad();
}

at::Tensor copied_by_rows(const at::Tensor& x) {
  return is_recorded(x) ? ContiguousRows::apply(x) : contiguous_copy(x);
}

}  // namespace

at::Tensor contiguous_rows(const at::Tensor& x) {
  return has_rows(x) ? copied_by_rows(x) : x.contiguous();
}

at::Tensor reshape_rows(const at::Tensor& x, at::IntArrayRef shape) {
  if (!has_rows(x)) {
    return x.reshape(shape);
  }
  const auto sizes = at::infer_size_dv(shape, x.numel());
  if (at::detail::computeStride(x.sizes(), x.strides(), sizes)) {
    return x.view(sizes);
  }
  return at::_unsafe_view(copied_by_rows(x), sizes);
}

at::Tensor roll_rows(const at::Tensor& x, at::IntArrayRef shifts, at::IntArrayRef dims) {
  const bool is_own = runs_own_code(x) && x.numel() > 0 && shifts.size() == dims.size() &&
                      !dims.empty() && are_distinct(dims, x.dim());
  if (!is_own) {
    return at::roll(x, shifts, dims);
  }
  return is_recorded(x) ? RolledRows::apply(x, shifts.vec(), dims.vec()) : rolled(x, shifts, dims);
}

std::vector<at::Tensor> select_rows(const at::Tensor& x, int64_t dim, int64_t count) {
  const bool is_plain = !x.is_conj() && !x.is_neg();  // an alias would lose that
  if (is_plain && x.size(dim) >= count && runs_own_code(x) && is_recorded(x)) {
    return SelectedRows::apply(x, dim < 0 ? dim + x.dim() : dim, count);
  }
  if (x.size(dim) == count) {
    return x.unbind(dim);
  }
  std::vector<at::Tensor> parts;
  for (int64_t i = 0; i < count; ++i) {
    parts.push_back(x.select(dim, i));
  }
  return parts;
}

}  // namespace ddp::ops::detail
