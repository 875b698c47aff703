// SPDX-License-Identifier: Apache-2.0
#include "train/graph/step_cache.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "core/fnv_hash.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/detail/model_weights.hpp"
#include "ddp/detail/module_tensors.hpp"
#include "ddp/detail/text.hpp"
#include "reduce/model/model_parts.hpp"
#include "reduce/reducer.hpp"

namespace ddp::detail {
namespace {

/// Number of kinds of batches remembered without a graph. Comparing them costs a few kernel
/// launches.
constexpr int64_t kKindsWithoutGraph = 256;

void add_layout(const at::Tensor& tensor, std::vector<int64_t>& key) {
  if (!tensor.defined()) {
    key.push_back(-1);
    return;
  }
  key.push_back(static_cast<int64_t>(tensor.scalar_type()));
  key.push_back(tensor.is_cpu() ? 0 : 1);
  key.push_back(tensor.requires_grad() ? 1 : 0);
  key.push_back(tensor.dim());
  key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
  key.insert(key.end(), tensor.strides().begin(), tensor.strides().end());
}

}  // namespace

std::string shapes_of(const StepCall& call) {
  ddp::detail::TextStream out;
  const auto space = [&out] { return out.tellp() > 0 ? " " : ""; };
  for (const at::Tensor* input : call.inputs) {
    if (input->defined()) {
      out << space() << input->sizes();
    }
  }
  for (const int64_t number : call.host_numbers) {
    out << space() << number;
  }
  return out.str();
}

StepCache::StepCache(const GraphedParts& parts, const GraphedStepOptions& options,
                     at::Device device, bool is_main)
    : parts_(parts),
      name_(options.name),
      max_graphs_(options.max_graphs),
      device_(device),
      is_main_(is_main) {}

void StepCache::make_key(const StepCall& call) {
  key_.clear();
  key_.push_back(at::GradMode::is_enabled());
  const bool autocast = at::autocast::is_autocast_enabled(device_.type());
  key_.push_back(autocast ? static_cast<int64_t>(at::autocast::get_autocast_dtype(device_.type()))
                          : -1);
  for (const auto* model : parts_.models) {
    key_.push_back(model->require_backward_grad_sync());
    key_.push_back(static_cast<int64_t>(mode_key(all_tensors(*model))));
    const auto buffers = deciding_buffer_state(*model);
    key_.push_back(buffers ? 1 + 2 * buffers->is_required + buffers->is_sent : 0);
  }
  key_.insert(key_.end(), call.host_numbers.begin(), call.host_numbers.end());
  for (const at::Tensor* input : call.inputs) {
    add_layout(*input, key_);
  }
}

// Hashes what a graph has baked in: the addresses, strides and dtypes of parameters, which
// of them are trained, the optimizers' state, the scaler's settings, and what models report by
// ops::invalidate_graphs().
uint64_t StepCache::parts_fingerprint() const {
  FnvHash hash;
  hash.add(ops::graph_invalidations());
  for (auto* model : parts_.models) {
    for (const auto& [name, tensor] : model->named_parameters()) {
      hash.add(tensor.has_storage() ? reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) : 0);
      hash.add((tensor.requires_grad() ? 1 : 2) + 4 * static_cast<uint64_t>(tensor.scalar_type()));
      for (const int64_t stride : tensor.strides()) {
        hash.add(static_cast<uint64_t>(stride));
      }
    }
  }
  for (const auto* optimizer : parts_.optimizers) {
    hash.add(static_cast<uint64_t>(optimizer->capture_version()));
  }
  if (const auto* scaler = parts_.scaler) {
    hash.add(std::bit_cast<uint64_t>(scaler->get_growth_factor()));
    hash.add(std::bit_cast<uint64_t>(scaler->get_backoff_factor()));
    hash.add(static_cast<uint64_t>(scaler->get_growth_interval()));
  }
  return hash.value();
}

// The bucket layout is also baked into a training graph, so a new layout invalidates it.
uint64_t StepCache::layout_versions() const {
  uint64_t sum = 0;  // versions only grow
  for (auto* model : parts_.models) {
    sum += static_cast<uint64_t>(model->reducer().gradients().layout().version);
  }
  return sum;
}

void StepCache::drop_stale() {
  drop_stale_parts();
  if (const auto now = layout_versions(); now != std::exchange(last_layouts_, now)) {
    drop_graphs(/*evaluations=*/false);
  }
}

void StepCache::drop_stale_parts() {
  if (const auto now = parts_fingerprint(); now != std::exchange(last_fingerprint_, now)) {
    drop_graphs(/*evaluations=*/true);
  }
}

void StepCache::drop_graphs(bool evaluations) {
  for (Kind& kind : kinds_) {
    if (evaluations || kind.trains) {
      kind.steps_before += std::exchange(kind.eager_steps, 0);
      kind.has_block = false;
      num_graphs_ -= kind.graph != nullptr ? 1 : 0;
      kind.graph.reset();
      kind.rehearsal.reset();
      kind.recorded.reset();
      kind.has_tried_checked = false;
    }
  }
}

StepCache::Kind* StepCache::find(const StepCall& call) {
  make_key(call);
  const bool full = num_graphs_ == max_graphs_;
  const auto found = std::find_if(kinds_.begin(), kinds_.end(),
                                  [this](const Kind& kind) { return kind.key == key_; });
  if (found != kinds_.end() && found->graph != nullptr) {
    return &*found;
  }
  if (full) {
    warn_too_many_kinds(call);
    return nullptr;
  }
  if (found != kinds_.end()) {
    std::rotate(found, found + 1, kinds_.end());  // the latest
    return &kinds_.back();
  }
  // Evicts the oldest kind that has no graph.
  if (static_cast<int64_t>(kinds_.size()) - num_graphs_ >= max_kinds_without_graph()) {
    kinds_.erase(std::find_if(kinds_.begin(), kinds_.end(),
                              [](const Kind& kind) { return kind.graph == nullptr; }));
    warn_too_many_kinds(call);
  }
  kinds_.push_back({.key = key_, .shapes = shapes_of(call), .trains = at::GradMode::is_enabled()});
  return &kinds_.back();
}

void StepCache::add_graph(Kind& kind, std::unique_ptr<StepGraph> graph) {
  kind.trains = kind.trains || graph->has_backward();
  kind.graph = std::move(graph);
  ++num_graphs_;
}

void StepCache::clear() {
  kinds_.clear();
  num_graphs_ = 0;
}

int64_t StepCache::max_kinds_without_graph() const {
  return std::max(kKindsWithoutGraph, max_graphs_);
}

/// Warns once that there are too many kinds for each to have a graph.
void StepCache::warn_too_many_kinds(const StepCall& call) {
  if (std::exchange(has_warned_, true) || !is_main_) {
    return;
  }
  const std::string met =
      num_graphs_ == max_graphs_
          ? concat("has ", max_graphs_, " CUDA graphs, the maximum")
          : concat("met more than ", max_kinds_without_graph(), " kinds of batches");
  log_warning(concat(name_, " ", met, ": batches of shape ", shapes_of(call),
                     " run eagerly; fix: use fewer batch shapes, or raise "
                     "GraphedStepOptions::max_graphs"));
}

}  // namespace ddp::detail
