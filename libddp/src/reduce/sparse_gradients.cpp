// SPDX-License-Identifier: Apache-2.0
#include "reduce/sparse_gradients.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <numeric>
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

/// Coalesced. `indices`: [rows], ascending.
at::Tensor make_rows(const at::Tensor& indices, const at::Tensor& values,
                     const at::Tensor& parameter) {
  // Without a check of the indices: the host would wait for their extremes.
  return at::_sparse_coo_tensor_unsafe(indices.unsqueeze(0), values, parameter.sizes(),
                                       values.options().layout(at::kSparse),
                                       /*is_coalesced=*/true);
}

at::Tensor no_rows(const at::Tensor& parameter) {
  auto sizes = parameter.sizes().vec();
  sizes[0] = 0;
  const auto options = parameter.options().requires_grad(false);
  return make_rows(at::empty({0}, options.dtype(at::kLong)), at::empty(sizes, options), parameter);
}

/// Coalesced; undefined if .grad is not rows. A rank that did not use the parameter has 0 rows.
at::Tensor own_rows(const at::Tensor& parameter, bool is_used) {
  const at::Tensor& grad = parameter.grad();
  if (!is_used || !grad.defined()) {
    return no_rows(parameter);
  }
  return is_rows(grad) ? grad.coalesce() : at::Tensor();
}

/// The rows of one parameter on this rank and, while they are gathered, on all ranks.
struct Rows {
  int parameter = 0;
  at::Tensor own = {};               // own_rows()
  std::vector<int64_t> counts = {};  // of rows, by rank
  at::Tensor indices = {};           // [total], rank after rank
  at::Tensor values = {};            // [total, …]
  std::vector<WorkPtr> works = {};
};

constexpr int64_t kNotRows = -1;  // a count: the rank has another gradient

void gather_counts(std::vector<Rows>& all, Communicator& communicator) {
  std::vector<int64_t> counts;
  for (const auto& rows : all) {
    counts.push_back(rows.own.defined() ? rows.own._nnz() : kNotRows);
  }
  const auto mine = at::tensor(counts, at::kLong).to(communicator.device());
  auto gathered = at::empty({communicator.world_size(), mine.size(0)}, mine.options());
  communicator.all_gather(gathered, mine)->wait();
  const auto by_parameter = gathered.cpu().t().contiguous();
  const auto* begin = by_parameter.const_data_ptr<int64_t>();
  for (auto& rows : all) {
    rows.counts.assign(begin, begin + communicator.world_size());
    begin += communicator.world_size();
  }
}

// All ranks throw, so none waits for another.
void check_all_have_rows(const ReducerParts& parts, const std::vector<Rows>& all) {
  for (const auto& rows : all) {
    const auto other = std::find(rows.counts.begin(), rows.counts.end(), kNotRows);
    if (other != rows.counts.end()) {
      check_layout(parts, rows.parameter);
      throw SettingsError(concat("rank ", other - rows.counts.begin(),
                                 " has a gradient of parameter ",
                                 parts.parameter_name(rows.parameter),
                                 " that is not rows (ddp.sparse=gather); its message has the fix"));
    }
  }
}

void start_gather(Rows& rows, Communicator& communicator) {
  const auto total = std::accumulate(rows.counts.begin(), rows.counts.end(), int64_t{0});
  const auto own_indices = rows.own._indices().reshape({-1});
  const auto own_values = rows.own._values().contiguous();
  auto sizes = own_values.sizes().vec();
  sizes[0] = total;
  rows.indices = at::empty({total}, own_indices.options());
  rows.values = at::empty(sizes, own_values.options());
  rows.works = {communicator.all_gather(rows.indices, own_indices.contiguous(), rows.counts),
                communicator.all_gather(rows.values, own_values, rows.counts)};
}

// coalesce() would add the rows of an index in an order that depends on the other rows: on CPUs its
// sort is not stable.
at::Tensor sum_in_rank_order(const Rows& rows, const at::Tensor& parameter) {
  const auto [indices, places] =
      at::_unique(rows.indices, /*sorted=*/true, /*return_inverse=*/true);
  auto sizes = rows.values.sizes().vec();
  sizes[0] = indices.numel();
  const auto sum = at::zeros(sizes, rows.values.options());
  int64_t begin = 0;
  for (const int64_t count : rows.counts) {
    // One rank has no index twice, so a GPU's atomic additions have an order, too.
    sum.index_add_(0, places.narrow(0, begin, count), rows.values.narrow(0, begin, count));
    begin += count;
  }
  return make_rows(indices, sum, parameter);
}

void check_names(const ModelTensors& tensors, const DdpOptions& options) {
  const auto& ignored = options.parameters_to_ignore;
  for (const auto& name : tensors.sparse_parameters) {
    const auto matches = [&](const NamedParameter& entry) { return entry.name == name; };
    if (std::none_of(tensors.parameters.begin(), tensors.parameters.end(), matches) &&
        std::find(ignored.begin(), ignored.end(), name) == ignored.end()) {
      throw SettingsError("ModelTensors::sparse_parameters names " + name +
                          ", which is not in ModelTensors::parameters");
    }
  }
}

void reduce_sparse(ReducerParts& parts, const std::vector<bool>& used) {
  auto& gradients = parts.gradients;
  auto& communicator = *parts.communicator;
  const auto sparse = sparse_indices(gradients);
  if (sparse.empty()) {
    return;
  }
  const TraceScope trace("gather sparse gradients", "compute");
  const auto& parameters = gradients.parameters();
  std::vector<Rows> all;
  for (const int index : sparse) {
    const auto i = static_cast<size_t>(index);
    all.push_back({.parameter = index, .own = own_rows(parameters[i].tensor, used[i])});
  }
  gather_counts(all, communicator);
  check_all_have_rows(parts, all);
  for (auto& rows : all) {
    start_gather(rows, communicator);
  }
  for (auto& rows : all) {
    for (const auto& work : rows.works) {
      work->wait();
    }
    const auto i = static_cast<size_t>(rows.parameter);
    if (used[i]) {
      auto sum = sum_in_rank_order(rows, parameters[i].tensor);
      parts.mean.divide(sum._values());
      gradients.set_sparse_sum(rows.parameter, std::move(sum));
    }
    rows = {};  // frees memory for the sums of the others
  }
}

}  // namespace

std::vector<bool> find_sparse(const NamedParameters& trained, const ModelTensors& tensors,
                              const DdpOptions& options) {
  const auto& sparse = tensors.sparse_parameters;
  if (options.sparse == SparseGradients::Refuse || sparse.empty()) {
    return {};
  }
  check_names(tensors, options);
  std::vector<bool> found(trained.size(), false);
  for (size_t i = 0; i < trained.size(); ++i) {
    const auto& [name, tensor] = trained[i];
    found[i] = std::find(sparse.begin(), sparse.end(), name) != sparse.end();
    const auto dtype = tensor.scalar_type();
    if (found[i] && tensor.dim() == 0) {
      throw SettingsError("ModelTensors::sparse_parameters names " + name +
                          ", which is a scalar and has no rows; fix: leave it out");
    }
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

std::vector<int> sparse_indices(const GradientArena& gradients) {
  std::vector<int> indices;
  for (size_t i = 0; i < gradients.specs().size(); ++i) {
    if (gradients.specs()[i].is_sparse) {
      indices.push_back(static_cast<int>(i));
    }
  }
  return indices;
}

void check_layout(const ReducerParts& parts, int index) {
  const at::Tensor& grad = parts.gradients.parameters()[static_cast<size_t>(index)].tensor.grad();
  const bool is_sparse = parts.gradients.specs()[static_cast<size_t>(index)].is_sparse;
  if (!grad.defined() || (is_sparse ? is_rows(grad) : grad.layout() == at::kStrided)) {
    return;
  }
  const auto name = parts.parameter_name(index);
  if (grad.layout() == at::kStrided) {
    throw SettingsError(
        "parameter " + name +
        " is gathered as rows (ddp.sparse=gather), but it has a dense gradient, for example of a "
        "layer that shares the embedding's weight; fix: set sparse(false) in the embedding");
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
  const auto sparse = sparse_indices(gradients);
  if (sparse.empty()) {
    return;
  }
  if (ops::detail::is_capturing(parts.communicator->device())) {
    throw SettingsError(
        "ddp.sparse=gather reads on the host how many rows the ranks gather, and cannot be "
        "captured in a CUDA graph; fix: run the step eagerly, or set sparse(false) in the "
        "embeddings");
  }
  for (const int i : sparse) {
    if (is_shared(gradients, i)) {
      throw SettingsError("ddp.sparse=gather: parameter " + parts.parameter_name(i) +
                          " has sparse gradients and belongs to several wrapped models, which is "
                          "not supported; fix: wrap the models as one, or set sparse(false)");
    }
  }
}

void drop_sparse(const GradientArena& gradients) {
  for (const int i : sparse_indices(gradients)) {
    gradients.parameters()[static_cast<size_t>(i)].tensor.mutable_grad() = at::Tensor();
  }
}

std::vector<bool> finish_reductions(ReducerParts& parts) {
  std::exception_ptr problem;
  try {
    parts.reductions.finish();
  } catch (...) {
    problem = std::current_exception();
  }
  auto used = parts.unused.finish_map();
  reduce_sparse(parts, used);
  if (problem) {
    std::rethrow_exception(problem);
  }
  return used;
}

}  // namespace ddp::detail
