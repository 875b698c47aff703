// SPDX-License-Identifier: Apache-2.0
// Every op that may write gradients of parameters into grad slots, with its twin of ATen's ops. A
// new op is one row.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ddp/ops/language.hpp"
#include "ddp/ops/vision.hpp"
#include "ops/vision/convolution_algorithms.hpp"

namespace ddp::test {

struct FusedOp {
  using Tensors = std::vector<torch::Tensor>;
  using Call = std::function<torch::Tensor(const torch::Tensor& x, const Tensors& parameters)>;

  std::string name;
  std::vector<int64_t> input;                    // batch first
  std::vector<std::vector<int64_t>> parameters;  // weights first, then biases
  Call fused, plain;
  bool on_cpu = false;  // writes into slots on a CPU too
};

namespace fused_op_rows {

using Tensors = FusedOp::Tensors;
using torch::Tensor;

/// As ATen's ops need it beside x.
inline Tensor as(const Tensor& parameter, const Tensor& x) {
  return parameter.to(x.scalar_type());
}
inline Tensor affine(const Tensor& x, const Tensor& weight, const Tensor& bias = {}) {
  return torch::linear(x, as(weight, x), bias.defined() ? as(bias, x) : Tensor());
}
inline Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  return torch::layer_norm(x.to(torch::kFloat), weight.sizes(), weight, bias).to(x.scalar_type());
}
/// A frozen weight of a linear layer, [32, 64].
inline Tensor base_of(const Tensor& x) {
  return torch::linspace(-0.2, 0.3, 32 * 64, torch::TensorOptions().device(x.device()))
      .view({32, 64})
      .sin()
      .to(x.scalar_type());
}
inline Tensor heads_of(const ops::AttentionHeads& heads) {
  return torch::cat({heads.query.flatten(2), heads.key.flatten(2) * 2, heads.value.flatten(2) * 3},
                    2);
}
inline Tensor labels_of(const Tensor& x) {
  return torch::arange(x.size(0), torch::TensorOptions(torch::kLong).device(x.device())) * 3;
}
inline ops::BatchNormLayer norm_of(const Tensor& weight, const Tensor& bias) {
  return {.weight = weight,
          .bias = bias,
          .running_mean = torch::zeros_like(weight.detach()),
          .running_var = torch::ones_like(weight.detach()),
          .kernel_counters = {}};
}
inline Tensor plain_norm(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  return torch::batch_norm(x.to(torch::kFloat), weight, bias, {}, {}, true, 0.1, 1e-5, false)
      .to(x.scalar_type());
}
inline Tensor channels_last(const Tensor& x) {
  return x.contiguous(torch::MemoryFormat::ChannelsLast);
}

inline std::vector<FusedOp> of_language() {
  std::vector<FusedOp> rows;
  rows.push_back(
      {"linear",
       {16, 64},
       {{32, 64}, {32}},
       [](const Tensor& x, const Tensors& p) { return ops::linear(x, p[0], {.bias = p[1]}); },
       [](const Tensor& x, const Tensors& p) { return affine(x, p[0], p[1]); }});
  rows.push_back({"linear, transposed",
                  {16, 64},
                  {{64, 32}, {32}},
                  [](const Tensor& x, const Tensors& p) {
                    return ops::linear(x, p[0], {.bias = p[1], .transposed = true});
                  },
                  [](const Tensor& x, const Tensors& p) { return affine(x, p[0].t(), p[1]); }});
  rows.push_back({"layer_norm",
                  {16, 64},
                  {{64}, {64}},
                  [](const Tensor& x, const Tensors& p) {
                    return ops::layer_norm(x, p[0], p[1], 1e-5).normed;
                  },
                  [](const Tensor& x, const Tensors& p) { return layer_norm(x, p[0], p[1]); }});
  rows.push_back(
      {"rms_norm",
       {16, 64},
       {{64}},
       [](const Tensor& x, const Tensors& p) { return ops::rms_norm(x, p[0], 1e-5).normed; },
       [](const Tensor& x, const Tensors& p) {
         const auto wide = x.to(torch::kFloat);
         return (wide * (wide.square().mean(-1, true) + 1e-5).rsqrt() * p[0]).to(x.scalar_type());
       }});
  rows.push_back({"add_layer_norm",
                  {16, 64},
                  {{64}, {64}, {64}},
                  [](const Tensor& x, const Tensors& p) {
                    return ops::add_layer_norm(x, x * 0.5, p[0], p[1], 1e-5, {.bias = p[2]}).normed;
                  },
                  [](const Tensor& x, const Tensors& p) {
                    return layer_norm(x + as(p[2], x) + x * 0.5, p[0], p[1]);
                  }});
  rows.push_back({"gelu",
                  {16, 64},
                  {{64}},
                  [](const Tensor& x, const Tensors& p) { return ops::gelu(x, {.bias = p[0]}); },
                  [](const Tensor& x, const Tensors& p) { return torch::gelu(x + as(p[0], x)); }});
  // The kernel needs dropout; this one drops next to nothing.
  rows.push_back({"add_branch",
                  {16, 64},
                  {{64}},
                  [](const Tensor& x, const Tensors& p) {
                    return ops::add_branch(x, x * 0.5, {.bias = p[0], .dropout_p = 1e-6});
                  },
                  [](const Tensor& x, const Tensors& p) { return x * 0.5 + (x + as(p[0], x)); }});
  rows.push_back({"split_heads",
                  {2, 8, 64},
                  {{64}},
                  [](const Tensor& x, const Tensors& p) {
                    const auto qkv = x + as(p[0].detach(), x);
                    return heads_of(ops::split_heads(qkv, 2, 1, {.added_bias = p[0]}));
                  },
                  [](const Tensor& x, const Tensors& p) {
                    return heads_of(ops::split_heads(x + as(p[0], x), 2, 1));
                  }});
  for (const int64_t chunk : {0, 8}) {
    rows.push_back(
        {chunk == 0 ? "linear_cross_entropy" : "linear_cross_entropy, chunked",
         {16, 64},
         {{48, 64}, {48}},
         [chunk](const Tensor& x, const Tensors& p) {
           const auto labels = labels_of(x);
           return ops::linear_cross_entropy(x, p[0], labels, {.chunk_tokens = chunk, .bias = p[1]})
                      .loss_sum /
                  x.size(0);
         },
         [](const Tensor& x, const Tensors& p) {
           return torch::cross_entropy_loss(affine(x, p[0], p[1]).to(torch::kFloat), labels_of(x));
         }});
    rows.back().on_cpu = chunk == 0;
  }
  return rows;
}

inline std::vector<FusedOp> of_adapters() {
  std::vector<FusedOp> rows;
  const auto plain_lora = [](const Tensor& x, const Tensor& weight, const Tensor& bias,
                             const Tensor& a, const Tensor& b) {
    return affine(x, weight, bias) + 0.5 * affine(affine(x, a), b);
  };
  rows.push_back({"lora_linear",
                  {16, 64},
                  {{8, 64}, {32, 8}},
                  [](const Tensor& x, const Tensors& p) {
                    return ops::lora_linear(x, base_of(x), p[0], p[1], {.scale = 0.5});
                  },
                  [plain_lora](const Tensor& x, const Tensors& p) {
                    return plain_lora(x, base_of(x), {}, p[0], p[1]);
                  }});
  rows.push_back({"lora_linear with a trained base",
                  {16, 64},
                  {{8, 64}, {32, 8}, {32, 64}, {32}},
                  [](const Tensor& x, const Tensors& p) {
                    return ops::lora_linear(x, as(p[2], x), p[0], p[1],
                                            {.scale = 0.5, .bias = as(p[3], x)});
                  },
                  [plain_lora](const Tensor& x, const Tensors& p) {
                    return plain_lora(x, p[2], p[3], p[0], p[1]);
                  }});
  rows.push_back({"lora_linear of gate and up",
                  {16, 64},
                  {{16, 64}, {32, 8}, {32}},
                  [](const Tensor& x, const Tensors& p) {
                    return ops::lora_linear(
                        x, base_of(x), p[0], p[1],
                        {.scale = 0.5, .bias = as(p[2], x), .out_sizes = {16, 16}, .gated = true});
                  },
                  [plain_lora](const Tensor& x, const Tensors& p) {
                    const auto as_ = p[0].chunk(2), bs = p[1].chunk(2), cs = p[2].chunk(2);
                    const auto weights = base_of(x).chunk(2);
                    const auto gate = plain_lora(x, weights[0], cs[0], as_[0], bs[0]);
                    return torch::silu(gate) * plain_lora(x, weights[1], cs[1], as_[1], bs[1]);
                  }});
  rows.push_back({"joined_rows",
                  {16, 64},
                  {{16, 64}, {8, 64}, {8, 64}},
                  [](const Tensor& x, const Tensors& p) { return affine(x, ops::joined_rows(p)); },
                  [](const Tensor& x, const Tensors& p) { return affine(x, torch::cat(p)); }});
  for (auto& row : rows) {
    row.on_cpu = true;
  }
  return rows;
}

inline FusedOp convolution(const std::string& name, int64_t kernel, int64_t pixels,
                           ops::Conv2dAlgorithm algorithm) {
  const int64_t padding = kernel / 2;
  return {name,
          {4, 16, pixels, pixels},
          {{32, 16, kernel, kernel}},
          [=](const Tensor& x, const Tensors& p) {
            return ops::conv2d(x, p[0], 1, padding, algorithm);
          },
          [=](const Tensor& x, const Tensors& p) {
            return torch::conv2d(x, as(p[0], x), {}, 1, padding);
          },
          algorithm == ops::Conv2dAlgorithm::Product};
}

inline FusedOp stem(const std::string& name, ops::StemAlgorithm algorithm) {
  return {name,
          {2, 3, 16, 16},
          {{64, 3, 7, 7}},
          [=](const Tensor& x, const Tensors& p) {
            return ops::stem_convolution(x.detach(), p[0], algorithm) + x.mean();
          },
          [](const Tensor& x, const Tensors& p) {
            return torch::conv2d(x.detach().to(p[0].scalar_type()), p[0], {}, 2, 3) + x.mean();
          },
          /*on_cpu=*/true};
}

inline std::vector<FusedOp> of_vision() {
  std::vector<FusedOp> rows;
  rows.push_back(convolution("conv2d, 1x1", 1, 8, ops::Conv2dAlgorithm::Product));
  rows.push_back(convolution("conv2d, 2x2 pixels", 3, 2, ops::Conv2dAlgorithm::Product));
  rows.push_back(convolution("conv2d, 3x3", 3, 8, ops::Conv2dAlgorithm::Auto));
  rows.push_back(stem("stem, patches", ops::StemAlgorithm::Im2col));
  rows.push_back(stem("stem, depth", ops::StemAlgorithm::SpaceToDepth));
  rows.push_back(
      {"batch_norm_relu",
       {4, 16, 4, 4},
       {{16}, {16}},
       [](const Tensor& x, const Tensors& p) {
         return ops::batch_norm_relu(channels_last(x), norm_of(p[0], p[1]));
       },
       [](const Tensor& x, const Tensors& p) { return torch::relu(plain_norm(x, p[0], p[1])); }});
  rows.push_back({"batch_norm",
                  {4, 16, 4, 4},
                  {{16}, {16}},
                  [](const Tensor& x, const Tensors& p) {
                    return ops::batch_norm(channels_last(x), norm_of(p[0], p[1])) + x;
                  },
                  [](const Tensor& x, const Tensors& p) { return plain_norm(x, p[0], p[1]) + x; }});
  rows.push_back(
      {"batch_norm_silu",
       {4, 16, 4, 4},
       {{16}, {16}},
       [](const Tensor& x, const Tensors& p) {
         return ops::batch_norm_silu(channels_last(x), norm_of(p[0], p[1]));
       },
       [](const Tensor& x, const Tensors& p) { return torch::silu(plain_norm(x, p[0], p[1])); }});
  rows.push_back({"batch_norm_add_relu of two norms",
                  {4, 16, 4, 4},
                  {{16}, {16}, {16}, {16}},
                  [](const Tensor& x, const Tensors& p) {
                    return ops::batch_norm_add_relu(channels_last(x), norm_of(p[0], p[2]),
                                                    channels_last(x.square()), norm_of(p[1], p[3]))
                        .branch;
                  },
                  [](const Tensor& x, const Tensors& p) {
                    return torch::relu(plain_norm(x, p[0], p[2]) +
                                       plain_norm(x.square(), p[1], p[3]));
                  }});
  rows.push_back(
      {"batch_norm_relu_max_pool",
       {4, 16, 8, 8},
       {{16}, {16}},
       [](const Tensor& x, const Tensors& p) {
         return ops::batch_norm_relu_max_pool(channels_last(x), norm_of(p[0], p[1])).branch;
       },
       [](const Tensor& x, const Tensors& p) {
         return torch::max_pool2d(torch::relu(plain_norm(x, p[0], p[1])), 3, 2, 1);
       }});
  rows.push_back(
      {"pooled_linear",
       {4, 16, 4, 4},
       {{10, 16}, {10}},
       [](const Tensor& x, const Tensors& p) { return ops::pooled_linear(x, p[0], p[1]); },
       [](const Tensor& x, const Tensors& p) {
         return affine(x.mean({2, 3}), p[0], p[1]);
       }});
  return rows;
}

}  // namespace fused_op_rows

/// All rows.
inline const std::vector<FusedOp>& all_fused_ops() {
  static const auto rows = [] {
    auto all = fused_op_rows::of_language();
    for (const auto& more : {fused_op_rows::of_adapters(), fused_op_rows::of_vision()}) {
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }();
  return rows;
}

/// Those that write into slots on `device`.
inline std::vector<FusedOp> fused_ops(at::Device device) {
  auto of_device = all_fused_ops();
  if (device.is_cpu()) {
    std::erase_if(of_device, [](const FusedOp& row) { return !row.on_cpu; });
  }
  return of_device;
}

}  // namespace ddp::test
