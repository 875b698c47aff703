// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Reduction.h>

#include <optional>
#include <utility>
#include <vector>

#include "ddp/ops/language.hpp"
#include "export/fusion/fused_functions.hpp"
#include "export/fusion/linear_layers.hpp"
#include "export/fusion/pattern_arguments.hpp"
#include "export/fusion/patterns.hpp"
#include "export/fusion/walk.hpp"

namespace ddp::detail {
namespace {

// The loss's logits: rows of a linear layer's result, optionally converted to float32.
struct Logits {
  LayerNodes layer;
  bool is_float = false;
  c10::IValue last_flattened = {};  // dimension; None: it is not flattened
};
std::optional<Logits> logits_of(const FusionGraph& graph, const Argument* value) {
  Walk walk(graph, value);
  Logits logits;
  const auto convert = [&] {
    const auto* node = walk.over_optional("to.dtype");
    const auto* dtype = node && node->input("dtype") ? node->input("dtype")->dtype() : nullptr;
    logits.is_float = logits.is_float || node != nullptr;
    return node == nullptr || (dtype != nullptr && *dtype == at::kFloat);
  };
  if (!convert()) {
    return std::nullopt;
  }
  const auto* view = walk.over_optional("view.default");
  const auto* reshape = view ? nullptr : walk.over_optional("reshape.default");
  const auto* flatten = view || reshape ? nullptr : walk.over_optional("flatten.using_ints");
  if (flatten != nullptr) {
    const auto last = integer_of(flatten->input("end_dim"), -1);
    if (integer_of(flatten->input("start_dim"), 0) != 0 || (last != 1 && last != -2)) {
      return std::nullopt;
    }
    logits.last_flattened = last;
  }
  if (!convert()) {
    return std::nullopt;
  }
  auto layer = private_layer(graph, walk.value());
  if (!layer || layer->transposed) {
    return std::nullopt;
  }
  if (view != nullptr || reshape != nullptr) {
    const auto* sizes = view ? view->input("size") : reshape->input("shape");
    if (!is_none(&layer->sizes) || sizes == nullptr || sizes->list() == nullptr) {
      return std::nullopt;
    }
    layer->sizes = *sizes;
  }
  layer->nodes.insert(layer->nodes.end(), walk.nodes().rbegin(), walk.nodes().rend());
  logits.layer = std::move(*layer);
  return logits;
}

}  // namespace

bool fuse_loss(FusionGraph& graph, std::size_t i) {
  const auto& node = graph.at(i);
  const auto reduction = integer_of(node.input("reduction"), at::Reduction::Mean);
  const auto ignore_index = integer_of(node.input("ignore_index"), ops::kIgnoreIndex);
  const double smoothing = number_of(node.input("label_smoothing"), 0);
  if (!is_call_of(node, "cross_entropy_loss.default") || !has_values(node, {"self", "target"}) ||
      !is_none(node.input("weight")) || is_value(node.input("ignore_index")) ||
      !(smoothing >= 0 && smoothing <= 1) ||
      (reduction != at::Reduction::Mean && reduction != at::Reduction::Sum)) {
    return false;
  }
  auto logits = logits_of(graph, node.input("self"));
  if (!logits) {
    return false;
  }
  auto inputs = logits->layer.arguments({{"is_float", {c10::IValue(logits->is_float)}},
                                         {"last_flattened", {logits->last_flattened}},
                                         {"labels", *node.input("target")},
                                         {"reduction", {c10::IValue(reduction)}},
                                         {"ignore_index", {c10::IValue(ignore_index)}},
                                         {"label_smoothing", {c10::IValue(smoothing)}}});
  logits->layer.nodes.push_back(i);
  return graph.replace(logits->layer.nodes, {.name = "linear_cross_entropy",
                                             .function = fused::linear_cross_entropy,
                                             .inputs = std::move(inputs)});
}

}  // namespace ddp::detail
