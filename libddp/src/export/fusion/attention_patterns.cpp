// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "export/fusion/all_true.hpp"
#include "export/fusion/fused_functions.hpp"
#include "export/fusion/linear_layers.hpp"
#include "export/fusion/pattern_arguments.hpp"
#include "export/fusion/patterns.hpp"
#include "export/fusion/walk.hpp"

namespace ddp::detail {
namespace {

/// Options of an attention that masks nothing but the future.
struct AttentionCall {
  double dropout_p = 0;
  bool is_causal = false, enable_gqa = false;
  c10::IValue scale = {};  // or None
};

std::optional<AttentionCall> attention_call(const FusionGraph& graph, std::size_t i) {
  const auto& node = graph.at(i);
  const auto *mask = node.input("attn_mask"), *scale = node.input("scale");
  const auto causal = truth_of(node.input("is_causal"), false);
  const auto gqa = truth_of(node.input("enable_gqa"), false);
  const double dropout_p = number_of(node.input("dropout_p"), 0);
  const bool is_scaled = !is_none(scale);
  if (!is_call_of(node, "scaled_dot_product_attention.default") ||
      !has_values(node, {"query", "key", "value"}) || !causal || !gqa || !(dropout_p >= 0) ||
      (is_scaled && std::isnan(number_of(scale, 0))) ||
      !(is_none(mask) || is_all_true(graph, mask))) {
    return std::nullopt;
  }
  return AttentionCall{dropout_p, *causal, *gqa,
                       is_scaled ? c10::IValue(number_of(scale, 0)) : c10::IValue()};
}

bool fuse_plain_attention(FusionGraph& graph, std::size_t i) {
  const auto call = attention_call(graph, i);
  const auto& node = graph.at(i);
  return call && graph.replace({i}, {.name = "attention",
                                     .function = fused::attention,
                                     .inputs = {{"query", *node.input("query")},
                                                {"key", *node.input("key")},
                                                {"value", *node.input("value")},
                                                {"dropout_p", {c10::IValue(call->dropout_p)}},
                                                {"is_causal", {c10::IValue(call->is_causal)}},
                                                {"scale", {call->scale}},
                                                {"enable_gqa", {c10::IValue(call->enable_gqa)}}},
                                     .changes_strides = true});
}

bool swaps(const Node* transpose, int64_t dim0, int64_t dim1) {
  return transpose != nullptr && integer_of(transpose->input("dim0"), 0) == dim0 &&
         integer_of(transpose->input("dim1"), 0) == dim1;
}

// packed[index], in heads: view [seq, batch * heads, dim], swapped, view [batch, heads, seq, dim].
struct Heads {
  std::vector<std::size_t> nodes;
  Argument packed, rows, sizes;  // rows, sizes: of the two views
};
std::optional<Heads> heads_of(const FusionGraph& graph, const Argument* value, int64_t index) {
  Walk walk(graph, value);
  const auto* heads = walk.over("view.default");
  const bool is_swapped = swaps(walk.over("transpose.int"), 0, 1);
  const auto* rows = walk.over("view.default");
  const auto* select = walk.over("select.int");
  if (select == nullptr || !is_swapped || integer_of(select->input("dim"), -1) != 0 ||
      integer_of(select->input("index"), -1) != index) {
    return std::nullopt;
  }
  return Heads{walk.nodes(), *walk.value(), *rows->input("size"), *heads->input("size")};
}

// The product of one matrix for query, key and value, as [3, seq, batch, width] of its own memory.
std::optional<LayerNodes> packed_projection(const FusionGraph& graph, const Argument& packed,
                                            const std::vector<std::size_t>& readers) {
  const auto copy = graph.source(&packed);
  if (!copy || !is_call_of(graph.at(*copy), "contiguous.default") ||
      !graph.is_read_only_by(&packed, readers)) {
    return std::nullopt;
  }
  Walk walk(graph, graph.at(*copy).input("self"));
  const auto* squeeze = walk.over("squeeze.dim");
  const bool is_swapped = swaps(walk.over("transpose.int"), 0, -2);
  const auto* unsqueeze = walk.over("unsqueeze.default");
  const auto* unflatten = walk.over("unflatten.int");
  if (unflatten == nullptr || !is_swapped || integer_of(squeeze->input("dim"), 0) != -2 ||
      integer_of(unsqueeze->input("dim"), -1) != 0 ||
      integer_of(unflatten->input("dim"), 0) != -1 ||
      integers_of(unflatten->input("sizes"), 2, -1).front() != 3) {
    return std::nullopt;
  }
  auto layer = private_layer(graph, walk.value());
  if (!layer || layer->transposed || !is_none(&layer->sizes)) {
    return std::nullopt;
  }
  layer->nodes.insert(layer->nodes.end(), walk.nodes().begin(), walk.nodes().end());
  layer->nodes.push_back(*copy);
  return layer;
}

struct MultiheadNodes {
  std::vector<std::size_t> nodes;
  std::vector<NamedArgument> inputs;
};

// The layer `out` ends torch.nn.MultiheadAttention of [seq, batch, width], before batch_first swaps
// back.
std::optional<MultiheadNodes> multihead_attention(const FusionGraph& graph, const LayerNodes& out) {
  if (out.transposed || is_none(&out.sizes)) {
    return std::nullopt;
  }
  Walk walk(graph, &out.input);
  const auto* flat = walk.over("view.default");
  walk.over_optional("contiguous.default");
  const auto* permute = walk.over("permute.default");
  const auto attention = permute ? graph.private_source(walk.value()) : std::nullopt;
  const auto call = attention ? attention_call(graph, *attention) : std::nullopt;
  if (!call || call->enable_gqa || !call->scale.isNone() ||
      integers_of(permute->input("dims"), 4, 0) != Integers{2, 0, 1, 3}) {
    return std::nullopt;
  }
  const auto& node = graph.at(*attention);
  const auto query = heads_of(graph, node.input("query"), 0);
  const auto key = heads_of(graph, node.input("key"), 1);
  const auto value = heads_of(graph, node.input("value"), 2);
  const auto fits = [&](const std::optional<Heads>& heads) {
    return heads && is_same_value(&query->packed, &heads->packed) &&
           are_same_sizes(query->rows, heads->rows) && are_same_sizes(query->sizes, heads->sizes);
  };
  if (!query || !fits(key) || !fits(value)) {
    return std::nullopt;
  }
  const auto layer = packed_projection(
      graph, query->packed, {query->nodes.back(), key->nodes.back(), value->nodes.back()});
  if (!layer || graph.is_written_later(layer->input.name()->name)) {
    return std::nullopt;  // the program's backward reads a copy of the input, the op's the input
  }
  auto nodes = layer->nodes;
  for (const auto& more : {query->nodes, key->nodes, value->nodes, walk.nodes(), out.nodes}) {
    nodes.insert(nodes.end(), more.begin(), more.end());
  }
  nodes.push_back(*attention);
  std::sort(nodes.begin(), nodes.end());
  return MultiheadNodes{std::move(nodes),
                        layer->arguments({{"rows", query->rows},
                                          {"heads", query->sizes},
                                          {"dropout_p", {c10::IValue(call->dropout_p)}},
                                          {"is_causal", {c10::IValue(call->is_causal)}},
                                          {"flat", *flat->input("size")},
                                          {"out_weight", out.weight},
                                          {"out_bias", out.bias},
                                          {"out_sizes", out.sizes}})};
}

bool fuse_multihead_attention(FusionGraph& graph, std::size_t i) {
  const auto& results = graph.at(i).outputs;
  const auto out = results.empty() ? std::nullopt : layer_that_makes(graph, &results.front());
  auto found = out ? multihead_attention(graph, *out) : std::nullopt;
  return found && graph.replace(found->nodes, {.name = "multihead_attention",
                                               .function = fused::multihead_attention,
                                               .inputs = std::move(found->inputs),
                                               .changes_strides = true});
}

}  // namespace

bool ends_multihead_attention(const FusionGraph& graph, const LayerNodes& layer) {
  return multihead_attention(graph, layer).has_value();
}

bool fuse_attention(FusionGraph& graph, std::size_t i) {
  return fuse_multihead_attention(graph, i) || fuse_plain_attention(graph, i);
}

}  // namespace ddp::detail
