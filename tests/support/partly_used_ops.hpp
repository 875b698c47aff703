// SPDX-License-Identifier: Apache-2.0
// Ops of which a loss uses some results only: inputs and parameters have a gradient where they have
// one with ATen's ops. A new op with several results is one row.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "ddp/ops/decoder.hpp"
#include "support/catch.hpp"
#include "support/fused_ops.hpp"
#include "support/rotary.hpp"

namespace ddp::test {

/// As FusedOp, with several results.
struct PartlyUsedOp {
  using Tensors = std::vector<torch::Tensor>;
  using Call = std::function<Tensors(const torch::Tensor& x, const Tensors& parameters)>;

  std::string name;
  std::vector<int64_t> input;
  std::vector<std::vector<int64_t>> parameters;
  Call fused, plain;
};

/// What happens to a result. NoGradient: an op reads it and returns no gradient for it.
enum class Use { Nothing, Loss, NoGradient };

namespace partly_used {

using fused_op_rows::affine;
using fused_op_rows::as;
using fused_op_rows::channels_last;
using fused_op_rows::norm_of;
using fused_op_rows::plain_norm;
using torch::Tensor;
using Tensors = PartlyUsedOp::Tensors;

class NoGradient : public torch::autograd::Function<NoGradient> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* /*ctx*/, const Tensor& x) {
    return torch::zeros({}, x.options().dtype(torch::kFloat));
  }
  static Tensors backward(torch::autograd::AutogradContext* /*ctx*/, const Tensors& /*grads*/) {
    return {Tensor()};
  }
};

inline Tensors both(const ops::NormedResidual& results) {
  return {results.normed, results.residual};
}
inline Tensors both(const ops::Fork& results) {
  return {results.branch, results.shortcut};
}

inline std::vector<PartlyUsedOp> of_language() {
  std::vector<PartlyUsedOp> rows;
  const auto norm = [](const Tensor& x, const Tensors& p) -> Tensors {
    return {fused_op_rows::layer_norm(x, p[0], p[1]), x};
  };
  rows.push_back(
      {"layer_norm",
       {16, 64},
       {{64}, {64}},
       [](const Tensor& x, const Tensors& p) { return both(ops::layer_norm(x, p[0], p[1], 1e-5)); },
       norm});
  rows.push_back(
      {"rms_norm",
       {16, 64},
       {{64}},
       [](const Tensor& x, const Tensors& p) { return both(ops::rms_norm(x, p[0], 1e-5)); },
       [](const Tensor& x, const Tensors& p) -> Tensors {
         return {torch::rms_norm(x.to(torch::kFloat), {64}, p[0], 1e-5).to(x.scalar_type()), x};
       }});
  for (const double dropout_p : {0.0, 1e-6}) {  // the latter drops next to nothing
    rows.push_back(
        {dropout_p == 0 ? "add_layer_norm" : "add_layer_norm with dropout",
         {16, 64},
         {{64}, {64}, {64}},
         [dropout_p](const Tensor& x, const Tensors& p) {
           return both(ops::add_layer_norm(x, x * 0.5, p[0], p[1], 1e-5,
                                           {.bias = p[2], .dropout_p = dropout_p}));
         },
         [norm](const Tensor& x, const Tensors& p) { return norm(x + as(p[2], x) + x * 0.5, p); }});
  }
  // The joined weight, an op's result itself, gets no gradient where only the residual is used.
  rows.push_back({"linear_and_residual of joined rows",
                  {16, 64},
                  {{16, 64}, {16, 64}, {32}},
                  [](const Tensor& x, const Tensors& p) -> Tensors {
                    const auto [product, residual] = ops::linear_and_residual(
                        x, as(ops::joined_rows({p[0], p[1]}), x), {.bias = as(p[2], x)});
                    return {product, residual};
                  },
                  [](const Tensor& x, const Tensors& p) -> Tensors {
                    return {affine(x, torch::cat({p[0], p[1]}), p[2]), x};
                  }});
  const auto heads = [](const Tensor& x, const Tensor& bias) -> Tensors {
    const auto split = ops::split_heads(x, 2, 1, {.added_bias = bias});
    return {split.query, split.key, split.value};
  };
  rows.push_back(
      {"split_heads",
       {2, 8, 64},
       {{64}},
       [heads](const Tensor& x, const Tensors& p) { return heads(x + as(p[0].detach(), x), p[0]); },
       [](const Tensor& x, const Tensors& p) {
         return (x + as(p[0], x)).view({2, 8, 4, 16}).split_with_sizes({2, 1, 1}, 2);
       }});
  rows.push_back(
      {"swiglu",
       {16, 64},
       {{64}},
       [](const Tensor& x, const Tensors& p) -> Tensors { return {ops::swiglu(x + as(p[0], x))}; },
       [](const Tensor& x, const Tensors& p) -> Tensors {
         const auto halves = (x + as(p[0], x)).chunk(2, -1);
         return {torch::silu(halves[0]) * halves[1]};
       }});
  rows.push_back({"swiglu of separate tensors",
                  {16, 64},
                  {{64}},
                  [](const Tensor& x, const Tensors& p) -> Tensors {
                    return {ops::swiglu(x, x + as(p[0], x))};
                  },
                  [](const Tensor& x, const Tensors& p) -> Tensors {
                    return {torch::silu(x) * (x + as(p[0], x))};
                  }});
  rows.push_back({"apply_rotary",
                  {2, 2, 4, 16},
                  {{16}},
                  [](const Tensor& x, const Tensors& p) -> Tensors {
                    const auto angles = as(p[0].detach(), x);
                    return {ops::apply_rotary(x + as(p[0], x), angles, angles)};
                  },
                  [](const Tensor& x, const Tensors& p) -> Tensors {
                    const auto angles = as(p[0].detach(), x);
                    return {rotated(x + as(p[0], x), angles, angles)};
                  }});
  rows.push_back({"cross_entropy",
                  {16, 64},
                  {{64}},
                  [](const Tensor& x, const Tensors& p) -> Tensors {
                    return {ops::cross_entropy(x + as(p[0], x), fused_op_rows::labels_of(x)).loss};
                  },
                  [](const Tensor& x, const Tensors& p) -> Tensors {
                    return {torch::cross_entropy_loss((x + as(p[0], x)).to(torch::kFloat),
                                                      fused_op_rows::labels_of(x))};
                  }});
  return rows;
}

inline std::vector<PartlyUsedOp> of_vision() {
  std::vector<PartlyUsedOp> rows;
  const auto fork = [](const Tensor& y) -> Tensors { return {y, y}; };
  rows.push_back({"batch_norm_relu_fork",
                  {4, 16, 4, 4},
                  {{16}, {16}},
                  [](const Tensor& x, const Tensors& p) {
                    return both(ops::batch_norm_relu_fork(channels_last(x), norm_of(p[0], p[1])));
                  },
                  [fork](const Tensor& x, const Tensors& p) {
                    return fork(torch::relu(plain_norm(x, p[0], p[1])));
                  }});
  rows.push_back({"batch_norm_add_relu",
                  {4, 16, 4, 4},
                  {{16}, {16}},
                  [](const Tensor& x, const Tensors& p) {
                    const auto in = channels_last(x);
                    return both(ops::batch_norm_add_relu(in, norm_of(p[0], p[1]), in));
                  },
                  [fork](const Tensor& x, const Tensors& p) {
                    return fork(torch::relu(plain_norm(x, p[0], p[1]) + x));
                  }});
  rows.push_back(
      {"batch_norm_add_relu of two norms",
       {4, 16, 4, 4},
       {{16}, {16}, {16}, {16}},
       [](const Tensor& x, const Tensors& p) {
         return both(ops::batch_norm_add_relu(channels_last(x), norm_of(p[0], p[2]),
                                              channels_last(x.square()), norm_of(p[1], p[3])));
       },
       [fork](const Tensor& x, const Tensors& p) {
         return fork(torch::relu(plain_norm(x, p[0], p[2]) + plain_norm(x.square(), p[1], p[3])));
       }});
  rows.push_back({"batch_norm_relu_max_pool",
                  {4, 16, 8, 8},
                  {{16}, {16}},
                  [](const Tensor& x, const Tensors& p) {
                    return both(
                        ops::batch_norm_relu_max_pool(channels_last(x), norm_of(p[0], p[1])));
                  },
                  [fork](const Tensor& x, const Tensors& p) {
                    return fork(torch::max_pool2d(torch::relu(plain_norm(x, p[0], p[1])), 3, 2, 1));
                  }});
  return rows;
}

/// The gradients of x and of the parameters.
inline Tensors gradients(const PartlyUsedOp& op, const PartlyUsedOp::Call& call,
                         const std::vector<Use>& uses, at::Device device) {
  torch::manual_seed(1);
  const auto value = [&](const std::vector<int64_t>& shape, double scale, double shift) {
    return (torch::randn(shape) * scale + shift).to(device);
  };
  auto x = value(op.input, 1, 0);
  if (device.is_cuda()) {
    x = x.to(torch::kBFloat16);  // as kernels need it
  }
  Tensors inputs = {x.requires_grad_(true)}, parameters;
  for (const auto& shape : op.parameters) {
    parameters.push_back(value(shape, 0.3, shape.size() == 1 ? 0.5 : 0).requires_grad_(true));
  }
  inputs.insert(inputs.end(), parameters.begin(), parameters.end());
  const auto results = call(x, parameters);
  auto loss = torch::zeros({}, torch::TensorOptions().device(device).requires_grad(true));
  for (size_t i = 0; i < results.size(); ++i) {
    const auto wide = results[i].to(torch::kFloat);
    if (uses[i] == Use::Loss) {
      loss =
          loss + (wide.dim() == 0 ? wide : wide.square().mean()) * (2.0 + static_cast<double>(i));
    } else if (uses[i] == Use::NoGradient) {
      loss = loss + NoGradient::apply(results[i]);
    }
  }
  loss.backward();
  Tensors grads;
  for (const auto& input : inputs) {
    grads.push_back(input.grad());
  }
  return grads;
}

/// Every choice of uses for `count` results.
inline std::vector<std::vector<Use>> choices_of_uses(size_t count) {
  std::vector<std::vector<Use>> choices = {{}};
  for (size_t i = 0; i < count; ++i) {
    std::vector<std::vector<Use>> longer;
    for (const auto& choice : choices) {
      for (const auto use : {Use::Nothing, Use::Loss, Use::NoGradient}) {
        longer.push_back(choice);
        longer.back().push_back(use);
      }
    }
    choices = longer;
  }
  return choices;
}

/// The rows above, and all of fused_ops.hpp.
inline std::vector<PartlyUsedOp> rows() {
  auto all = of_language();
  const auto more = of_vision();
  all.insert(all.end(), more.begin(), more.end());
  const auto list = [](const FusedOp::Call& call) {
    return [call](const Tensor& x, const Tensors& p) -> Tensors { return {call(x, p)}; };
  };
  for (const auto& op : all_fused_ops()) {
    all.push_back({op.name, op.input, op.parameters, list(op.fused), list(op.plain)});
  }
  return all;
}

}  // namespace partly_used

/// Compares each op with its plain twin for every use of its results.
inline void check_partly_used_ops(at::Device device) {
  // In bf16 roundings differ, and the largest of nearly equal pixels may be another one.
  const double bound = device.is_cpu() ? 1e-4 : 0.2;
  for (const auto& op : partly_used::rows()) {
    const auto shaped = [&](const std::vector<int64_t>& shape) {
      return torch::ones(shape, torch::TensorOptions().device(device));
    };
    std::vector<torch::Tensor> parameters;
    for (const auto& shape : op.parameters) {
      parameters.push_back(shaped(shape));
    }
    const auto count = op.plain(shaped(op.input), parameters).size();
    for (const auto& uses : partly_used::choices_of_uses(count)) {
      std::string described;
      for (const auto use : uses) {
        described += use == Use::Loss ? "loss " : use == Use::Nothing ? "nothing " : "no gradient ";
      }
      CAPTURE(op.name, described);
      const auto got = partly_used::gradients(op, op.fused, uses, device);
      const auto wanted = partly_used::gradients(op, op.plain, uses, device);
      for (size_t i = 0; i < got.size(); ++i) {
        INFO((i == 0 ? std::string("x") : "parameter " + std::to_string(i - 1)));
        CHECK(got[i].defined() == wanted[i].defined());
        if (got[i].defined() && wanted[i].defined()) {
          const double norm = wanted[i].to(torch::kFloat).norm().item<double>();
          const auto difference = (got[i].to(torch::kFloat) - wanted[i].to(torch::kFloat)).norm();
          CHECK(difference.item<double>() <= bound * norm + 1e-6);
        }
      }
    }
  }
}

}  // namespace ddp::test
