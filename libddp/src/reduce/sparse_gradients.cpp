// SPDX-License-Identifier: Apache-2.0
#include "reduce/sparse_gradients.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "ddp/core/error.hpp"
#include "ddp/detail/trace_scope.hpp"
#include "ops/shared/timing_event.hpp"
#include "reduce/backward_pass.hpp"
#include "reduce/model/shared_parameters.hpp"

namespace ddp::detail {
namespace {

bool is_rows(const at::Tensor& grad) {
  return grad.layout() == at::kSparse && grad.sparse_dim() == 1;
}

at::Tensor make_rows(const at::Tensor& indices, const at::Tensor& values,
                     const at::Tensor& parameter) {
  // Without a check of the indices: the host would wait for their extremes.
  return at::_sparse_coo_tensor_unsafe(
      indices, values, parameter.sizes(),
      at::TensorOptions().dtype(values.scalar_type()).device(values.device()).layout(at::kSparse));
}

at::Tensor no_rows(const at::Tensor& parameter) {
  auto sizes = parameter.sizes().vec();
  sizes[0] = 0;
  const auto options = parameter.options().requires_grad(false);
  return make_rows(at::empty({1, 0}, options.dtype(at::kLong)), at::empty(sizes, options),
                   parameter);
}

/// The rows of one parameter on this rank and, while they are gathered, on all ranks.
struct Rows {
  int parameter = 0;
  at::Tensor own = {};      // coalesced
  at::Tensor indices = {};  // [total]
  at::Tensor values = {};   // [total, …]
  std::vector<WorkPtr> works = {};
};

// Returns the number of rows of each parameter on each rank: [world_size, parameters] on the host.
at::Tensor gather_counts(const std::vector<Rows>& all, Communicator& communicator) {
  std::vector<int64_t> counts;
  for (const auto& rows : all) {
    counts.push_back(rows.own._nnz());
  }
  const auto mine = at::tensor(counts, at::kLong).to(communicator.device());
  auto gathered = at::empty({communicator.world_size(), mine.size(0)}, mine.options());
  communicator.all_gather(gathered, mine)->wait();
  return gathered.cpu();
}

void start_gather(Rows& rows, Communicator& communicator, const std::vector<int64_t>& counts) {
  int64_t total = 0;
  for (const int64_t count : counts) {
    total += count;
  }
  const auto own_indices = rows.own._indices().reshape({-1});
  const auto own_values = rows.own._values().contiguous();
  auto sizes = own_values.sizes().vec();
  sizes[0] = total;
  rows.indices = at::empty({total}, own_indices.options());
  rows.values = at::empty(sizes, own_values.options());
  rows.works = {communicator.all_gather(rows.indices, own_indices.contiguous(), counts),
                communicator.all_gather(rows.values, own_values, counts)};
}

}  // namespace

std::vector<bool> find_sparse(const NamedParameters& parameters,
                              const std::vector<std::string>& sparse, const DdpOptions& options) {
  if (options.sparse == SparseGradients::Refuse || sparse.empty()) {
    return {};
  }
  std::vector<bool> found(parameters.size(), false);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, tensor] = parameters[i];
    found[i] = std::find(sparse.begin(), sparse.end(), name) != sparse.end();
    const auto dtype = tensor.scalar_type();
    if (found[i] && dtype != at::kFloat && dtype != at::kDouble) {
      throw SettingsError(concat("ddp.sparse=gather: parameter ", name, " has sparse gradients of ",
                                 dtype,
                                 ", whose sums over the ranks would be rounded; allowed are "
                                 "float32 and float64; fix: keep the embedding in float32, or set "
                                 "sparse(false)"));
    }
  }
  return found;
}

bool any_is_sparse(const GradientArena& gradients) {
  for (size_t i = 0; i < gradients.parameters().size(); ++i) {
    if (gradients.is_sparse(static_cast<int>(i))) {
      return true;
    }
  }
  return false;
}

void check_layout(const ReducerParts& parts, int index) {
  const at::Tensor& grad = parts.gradients.parameters()[static_cast<size_t>(index)].tensor.grad();
  const bool is_sparse = parts.gradients.is_sparse(index);
  if (!grad.defined() || (is_sparse ? is_rows(grad) : grad.layout() == at::kStrided)) {
    return;
  }
  const auto name = parts.parameter_name(index);
  if (grad.layout() == at::kStrided) {
    throw SettingsError(
        "parameter " + name +
        " is gathered as rows (ddp.sparse=gather), but an operation gave it a dense gradient, for "
        "example a layer that shares the embedding's weight; fix: set sparse(false) in the "
        "embedding");
  }
  if (parts.options.sparse == SparseGradients::Refuse) {
    throw SettingsError(
        "parameter " + name +
        " got a sparse gradient, and ddp.sparse=refuse reduces only dense ones; fix: for an "
        "embedding set sparse(false), or set ddp.sparse=gather");
  }
  throw SettingsError(concat(
      "parameter ", name, " got a gradient of layout ", grad.layout(),
      grad.layout() == at::kSparse ? concat(" with ", grad.sparse_dim(), " sparse dimensions") : "",
      ", which ddp.sparse=gather does not gather; allowed are rows (one sparse dimension) of "
      "torch::nn::Embedding and EmbeddingBag with sparse(true), and of parameters named in "
      "ModelTensors::sparse_parameters; fix: name the parameter there, or use sparse(false)"));
}

void refuse_uses_of_sparse(const ReducerParts& parts) {
  const auto& gradients = parts.gradients;
  if (!any_is_sparse(gradients)) {
    return;
  }
  if (ops::detail::is_capturing(parts.communicator->device())) {
    throw SettingsError(
        "ddp.sparse=gather reads on the host how many rows the ranks gather, and cannot be "
        "captured in a CUDA graph; fix: run the step eagerly, or set sparse(false) in the "
        "embeddings");
  }
  for (int i = 0; i < static_cast<int>(gradients.parameters().size()); ++i) {
    if (gradients.is_sparse(i) && is_shared(gradients, i)) {
      throw SettingsError("ddp.sparse=gather: parameter " + parts.parameter_name(i) +
                          " has sparse gradients and belongs to several wrapped models, which is "
                          "not supported; fix: wrap the models as one, or set sparse(false)");
    }
  }
}

void reduce_sparse(ReducerParts& parts, const std::vector<bool>& used) {
  auto& gradients = parts.gradients;
  auto& communicator = *parts.communicator;
  if (!any_is_sparse(gradients)) {
    return;
  }
  const TraceScope trace("gather sparse gradients", "compute");
  const auto& parameters = gradients.parameters();
  std::vector<Rows> all;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const int index = static_cast<int>(i);
    if (gradients.is_sparse(index)) {
      const at::Tensor& grad = parameters[i].tensor.grad();
      // A backward that threw may have left any gradient, and this rank still takes part.
      const bool has_rows = used[i] && grad.defined() && is_rows(grad);
      all.push_back(
          {.parameter = index, .own = has_rows ? grad.coalesce() : no_rows(parameters[i].tensor)});
    }
  }
  const auto counts = gather_counts(all, communicator);
  for (size_t s = 0; s < all.size(); ++s) {
    const auto column = counts.select(1, static_cast<int64_t>(s)).contiguous();
    const auto* begin = column.const_data_ptr<int64_t>();
    start_gather(all[s], communicator, {begin, begin + column.numel()});
  }
  for (auto& rows : all) {
    for (const auto& work : rows.works) {
      work->wait();
    }
    const auto i = static_cast<size_t>(rows.parameter);
    if (used[i]) {
      auto sum =
          make_rows(rows.indices.view({1, -1}), rows.values, parameters[i].tensor).coalesce();
      parts.mean.divide(sum._values());
      gradients.set_sparse_sum(rows.parameter, std::move(sum));
    }
  }
}

}  // namespace ddp::detail
