// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "export/fusion/fused_functions.hpp"
#include "export/fusion/pattern_arguments.hpp"
#include "export/fusion/patterns.hpp"

namespace ddp::detail {
namespace {

// checkpointed_call.cpp finds the running estimates by these names.
constexpr std::array kNormInputs = {"input",       "weight",   "bias",     "running_mean",
                                    "running_var", "training", "momentum", "eps"};

// The arguments of a batch norm with weights and running estimates. Empty for any other node.
std::optional<std::vector<NamedArgument>> norm_inputs(const FusionGraph& graph, std::size_t i) {
  const auto& node = graph.at(i);
  if (!is_call_of(node, "batch_norm.default")) {
    return std::nullopt;
  }
  std::vector<NamedArgument> inputs;
  for (const char* name : kNormInputs) {
    const auto* input = node.input(name);
    const bool is_tensor = inputs.size() < 5;
    if (input == nullptr || (is_tensor ? input->name() == nullptr : !input->constant())) {
      return std::nullopt;
    }
    inputs.push_back({name, *input});
  }
  const bool is_plain = inputs[5].value.constant()->isBool() &&
                        inputs[6].value.constant()->isDouble() &&
                        inputs[7].value.constant()->isDouble();
  return is_plain ? std::optional(std::move(inputs)) : std::nullopt;
}

struct Norm {
  std::size_t node;
  std::vector<NamedArgument> inputs;
};

// The batch norm that only makes this value.
std::optional<Norm> private_norm(const FusionGraph& graph, const Argument* value) {
  const auto source = graph.private_source(value);
  auto inputs = source ? norm_inputs(graph, *source) : std::nullopt;
  return inputs ? std::optional(Norm{*source, std::move(*inputs)}) : std::nullopt;
}

bool fuse_residual(FusionGraph& graph, std::size_t sum, std::size_t relu) {
  const auto& node = graph.at(sum);
  if (!is_plain_sum(node)) {
    return false;
  }
  const auto *a = node.input("self"), *b = node.input("other");
  auto first = private_norm(graph, a), second = private_norm(graph, b);
  const bool in_place = is_call_of(node, "add_.Tensor");
  const NamedArgument how{"in_place", {c10::IValue(in_place)}};
  if (!first && in_place) {
    return false;  // it would no longer write the other value
  }
  if (first && second) {
    if (!graph.are_independent(first->node, second->node)) {
      return false;  // the op normalises both at once
    }
    auto inputs = first->inputs;
    inputs.insert(inputs.end(), second->inputs.begin(), second->inputs.end());
    inputs.push_back(how);
    inputs.push_back({"x_first", {c10::IValue(first->node < second->node)}});
    return graph.replace(
        {std::min(first->node, second->node), std::max(first->node, second->node), sum, relu},
        {.name = "batch_norm_add_relu",
         .function = fused::two_batch_norms_add_relu,
         .inputs = std::move(inputs),
         .forks = true,
         .changes_strides = true});
  }
  const auto* residual = first ? b : a;
  auto& norm = first ? first : second;
  if (!norm || graph.is_number(*residual)) {
    return false;
  }
  norm->inputs.push_back({"residual", *residual});
  norm->inputs.push_back(how);
  norm->inputs.push_back({"norm_first", {c10::IValue(first.has_value())}});
  return graph.replace({norm->node, sum, relu}, {.name = "batch_norm_add_relu",
                                                 .function = fused::batch_norm_add_relu,
                                                 .inputs = std::move(norm->inputs),
                                                 .forks = true,
                                                 .changes_strides = true});
}

bool is_relu(const Node& node) {
  return is_call_of(node, "relu.default") || is_call_of(node, "relu_.default");
}

bool fuse_relu(FusionGraph& graph, std::size_t relu) {
  if (!is_relu(graph.at(relu))) {
    return false;
  }
  const auto* value = graph.at(relu).input("self");
  if (auto norm = private_norm(graph, value)) {
    return graph.replace({norm->node, relu}, {.name = "batch_norm_relu",
                                              .function = fused::batch_norm_relu,
                                              .inputs = std::move(norm->inputs),
                                              .forks = true,
                                              .changes_strides = true});
  }
  const auto sum = graph.private_source(value);
  return sum && fuse_residual(graph, *sum, relu);
}

// A norm with silu, or a norm alone: its readers come first, so another chain may take it.
bool fuse_silu_or_norm(FusionGraph& graph, std::size_t i) {
  const auto& node = graph.at(i);
  const bool is_silu = is_call_of(node, "silu.default") || is_call_of(node, "silu_.default");
  if (auto norm = is_silu ? private_norm(graph, node.input("self")) : std::nullopt) {
    return graph.replace({norm->node, i}, {.name = "batch_norm_silu",
                                           .function = fused::batch_norm_silu,
                                           .inputs = std::move(norm->inputs),
                                           .changes_strides = true});
  }
  auto inputs = norm_inputs(graph, i);
  return inputs && graph.replace({i}, {.name = "batch_norm",
                                       .function = fused::batch_norm,
                                       .inputs = std::move(*inputs),
                                       .changes_strides = true});
}

bool fuse_max_pool(FusionGraph& graph, std::size_t pool) {
  const auto& node = graph.at(pool);
  if (!is_call_of(node, "max_pool2d.default") ||
      integers_of(node.input("kernel_size"), 2, 0) != Integers{3, 3} ||
      integers_of(node.input("stride"), 2, 0) != Integers{2, 2} ||
      integers_of(node.input("padding"), 2, 0) != Integers{1, 1} ||
      integers_of(node.input("dilation"), 2, 1) != Integers{1, 1} ||
      truth_of(node.input("ceil_mode"), false) != false) {
    return false;
  }
  const auto relu = graph.private_source(node.input("self"));
  auto norm = relu && is_relu(graph.at(*relu)) ? private_norm(graph, graph.at(*relu).input("self"))
                                               : std::nullopt;
  return norm &&
         graph.replace({norm->node, *relu, pool}, {.name = "batch_norm_relu_max_pool",
                                                   .function = fused::batch_norm_relu_max_pool,
                                                   .inputs = std::move(norm->inputs),
                                                   .forks = true,
                                                   .changes_strides = true});
}

bool fuse_convolution(FusionGraph& graph, std::size_t i) {
  const auto& node = graph.at(i);
  const auto stride = integers_of(node.input("stride"), 2, 1);
  const auto padding = integers_of(node.input("padding"), 2, 0);
  const auto* bias = node.input("bias");
  const bool makes_patches = is_value(bias) && stride[0] > 1 && padding[0] == 0;
  if (!is_call_of(node, "conv2d.default") || !has_values(node, {"input", "weight"}) ||
      !(is_none(bias) || makes_patches) || stride[0] < 1 || padding[0] < 0 ||
      stride[0] != stride[1] || padding[0] != padding[1] ||
      integers_of(node.input("dilation"), 2, 1) != Integers{1, 1} ||
      integer_of(node.input("groups"), 1) != 1) {
    return false;
  }
  return graph.replace({i}, {.name = "conv2d",
                             .function = fused::convolution,
                             .inputs = {{"x", *node.input("input")},
                                        {"weight", *node.input("weight")},
                                        {"bias", bias ? *bias : Argument{}},
                                        {"stride", {c10::IValue(stride[0])}},
                                        {"padding", {c10::IValue(padding[0])}}},
                             .changes_strides = true});
}

bool fuse_head(FusionGraph& graph, std::size_t linear) {
  const auto& node = graph.at(linear);
  if (!is_call_of(node, "linear.default") || !has_values(node, {"input", "weight", "bias"})) {
    return false;
  }
  const auto flatten = graph.private_call(node.input("input"), "flatten.using_ints");
  if (!flatten || integer_of(graph.at(*flatten).input("start_dim"), 0) != 1 ||
      integer_of(graph.at(*flatten).input("end_dim"), -1) != -1) {
    return false;
  }
  const auto pool = graph.private_source(graph.at(*flatten).input("self"));
  if (!pool || !pools_to_one_pixel(graph.at(*pool)) || !is_value(graph.at(*pool).input("self"))) {
    return false;
  }
  return graph.replace({*pool, *flatten, linear}, {.name = "pooled_linear",
                                                   .function = fused::pooled_linear,
                                                   .inputs = {{"x", *graph.at(*pool).input("self")},
                                                              {"weight", *node.input("weight")},
                                                              {"bias", *node.input("bias")}}});
}

bool is_global_pool(const Node& node) {
  return pools_to_one_pixel(node) ||
         (is_call_of(node, "mean.dim") &&
          integers_of(node.input("dim"), 2, kNoInteger) == Integers{2, 3} &&
          truth_of(node.input("keepdim"), false) == true && is_none(node.input("dtype")));
}

bool makes_gate(const Node& node) {
  return is_call_of(node, "sigmoid.default") || is_call_of(node, "sigmoid_.default") ||
         is_call_of(node, "hardsigmoid.default") || is_call_of(node, "hardsigmoid_.default");
}

// A product of two values, of which either may be the other's scale.
struct Scaling {
  Argument x, scale;
  bool scale_first;

  std::vector<NamedArgument> arguments() const {
    return {{"x", x}, {"scale", scale}, {"scale_first", {c10::IValue(scale_first)}}};
  }
};
std::vector<Scaling> scalings(const Node& node) {
  if (!is_call_of(node, "mul.Tensor") || !has_values(node, {"self", "other"})) {
    return {};
  }
  const auto &self = *node.input("self"), &other = *node.input("other");
  return {{other, self, true}, {self, other, false}};
}

// Squeeze and excitation: x times a gate. The other reader of x is a global pool in front of the
// product. Both nodes keep their places, so on the CPU nothing changes.
bool fuse_channel_scale(FusionGraph& graph, std::size_t product) {
  for (const auto& scaling : scalings(graph.at(product))) {
    const auto& x = scaling.x;
    const auto gate = graph.source(&scaling.scale);
    const auto readers = graph.all_readers(&x);
    if (!gate || !makes_gate(graph.at(*gate)) || readers.size() != 2 ||
        !is_global_pool(graph.at(readers[0])) || graph.is_written_later(x.name()->name)) {
      continue;
    }
    const bool by_mean = is_call_of(graph.at(readers[0]), "mean.dim");
    const FusedCall pooling = {.name = "channel_means",
                               .function = fused::channel_means,
                               .inputs = {{"x", x}, {"by_mean", {c10::IValue(by_mean)}}},
                               .passes_on = x.name()->name};
    return graph.replace({product}, {.name = "scale_channels",
                                     .function = fused::scale_channels,
                                     .inputs = scaling.arguments(),
                                     .changes_strides = true}) &&
           graph.replace({readers[0]}, pooling);
  }
  return false;
}

bool is_drawn(const FusionGraph& graph, const Argument* value) {
  const auto source = graph.source(value);
  return source && (is_call_of(graph.at(*source), "bernoulli_.float") ||
                    is_call_of(graph.at(*source), "bernoulli.p"));
}

// Stochastic depth as torchvision and timm write it: x times drawn numbers over a probability.
bool fuse_sample_scale(FusionGraph& graph, std::size_t product) {
  for (const auto& scaling : scalings(graph.at(product))) {
    const auto division = graph.source(&scaling.scale);
    if (division && !graph.is_number(scaling.x) &&
        (is_call_of(graph.at(*division), "div_.Tensor") ||
         is_call_of(graph.at(*division), "div.Tensor")) &&
        is_drawn(graph, graph.at(*division).input("self"))) {
      return graph.replace({product}, {.name = "scale_samples",
                                       .function = fused::scale_samples,
                                       .inputs = scaling.arguments()});
    }
  }
  return false;
}

}  // namespace

bool fuse_vision(FusionGraph& graph, std::size_t i) {
  return fuse_max_pool(graph, i) || fuse_relu(graph, i) || fuse_silu_or_norm(graph, i) ||
         fuse_convolution(graph, i) || fuse_head(graph, i) || fuse_channel_scale(graph, i) ||
         fuse_sample_scale(graph, i);
}

}  // namespace ddp::detail
