// SPDX-License-Identifier: Apache-2.0
// LARS and LAMB compared with the formulas of their papers in double.
#include <torch/torch.h>

#include <functional>

#include "ddp/optim/make_optimizer.hpp"
#include "support/catch.hpp"
#include "unit/optim/optim_test_support.hpp"

using namespace optim_test;
using ddp::NamedParameters;
using ddp::OptimizerImplementation;
using ddp::OptimizerOptions;
using ddp::OptimizerType;

namespace {

constexpr double kLr = 0.03125;
constexpr int64_t kSteps = 20;

// One parameter in double, as in the papers.
struct Reference {
  at::Tensor w, m, v;
  double weight_decay;
  double lr_scale;
  bool adapts;
};

double length(const at::Tensor& tensor) {
  return std::sqrt(tensor.square().sum().item<double>());
}

// arXiv:1708.03888, algorithm 1.
void lars(Reference& p, const at::Tensor& g, const OptimizerOptions& o, int64_t /*t*/) {
  const double wn = length(p.w);
  const double gn = length(g);
  const double ratio = p.adapts && wn > 0 && gn > 0
                           ? o.trust_coefficient * wn / (gn + p.weight_decay * wn + o.eps)
                           : 1.0;
  p.m = o.momentum * p.m + kLr * p.lr_scale * ratio * (g + p.weight_decay * p.w);
  p.w = p.w - p.m;
}

// arXiv:1904.00962, algorithm 2.
void lamb(Reference& p, const at::Tensor& g, const OptimizerOptions& o, int64_t t) {
  p.m = o.beta1 * p.m + (1 - o.beta1) * g;
  p.v = o.beta2 * p.v + (1 - o.beta2) * g * g;
  const at::Tensor mean = p.m / (1 - std::pow(o.beta1, t));
  const at::Tensor square = p.v / (1 - std::pow(o.beta2, t));
  const at::Tensor r = mean / (square.sqrt() + o.eps) + p.weight_decay * p.w;
  const double wn = length(p.w);
  const double rn = length(r);
  const double ratio = p.adapts && wn > 0 && rn > 0 ? wn / rn : 1.0;
  p.w = p.w - kLr * p.lr_scale * ratio * r;
}

NamedParameters layers() {
  return {{"fc.weight", weights({7, 13}, 0)},
          {"fc.bias", weights({13}, 1)},
          {"zero.weight", at::zeros({3, 3}).requires_grad_()},
          {"half.weight", weights({33, 5}, 2).detach().to(at::kBFloat16).requires_grad_()},
          {"head.weight", weights({5, 5}, 3)}};
}

void check(const OptimizerOptions& options, bool adapts_all,
           const std::function<void(Reference&, const at::Tensor&, const OptimizerOptions&,
                                    int64_t)>& rule) {
  NamedParameters parameters = layers();
  std::vector<Reference> references;
  for (const auto& [name, tensor] : parameters) {
    const at::Tensor w = tensor.detach().to(at::kDouble).clone();
    const bool one = tensor.dim() == 1;
    const bool head = name == "head.weight";
    references.push_back({.w = w,
                          .m = at::zeros_like(w),
                          .v = at::zeros_like(w),
                          .weight_decay = one ? 0.0 : (head ? 0.125 : options.weight_decay),
                          .lr_scale = head ? 0.5 : 1.0,
                          .adapts = adapts_all || !one});
  }
  auto optimizer = ddp::make_optimizer(parameters, options);
  for (int64_t step = 0; step < kSteps; ++step) {
    for (size_t k = 0; k < parameters.size(); ++k) {
      const at::Tensor g = gradient(parameters[k].tensor.sizes(), static_cast<int64_t>(k), step);
      parameters[k].tensor.mutable_grad() = g;
      rule(references[k], g.to(at::kDouble), options, step + 1);
    }
    optimizer->step(kLr);
  }
  const auto state = optimizer->state_dict();
  for (size_t k = 0; k < parameters.size(); ++k) {
    INFO(parameters[k].name);
    const bool half = parameters[k].tensor.scalar_type() == at::kBFloat16;
    const at::Tensor weight =
        half ? state.tensors.at("state." + parameters[k].name + ".master") : parameters[k].tensor;
    // float32 compared with double: about an ulp per step.
    CHECK(ulps(weight, references[k].w) <= 24.0);
    if (half) {
      CHECK(at::equal(parameters[k].tensor.detach(), weight.to(at::kBFloat16)));
    }
  }
}

OptimizerOptions trust_options(OptimizerType type) {
  OptimizerOptions options;
  options.type = type;
  options.momentum = 0.9;
  options.weight_decay = 0.01;
  options.decay_norm_and_bias = false;
  options.trust_coefficient = 0.25;
  options.eps = type == OptimizerType::Lamb ? 1e-4 : 1e-8;
  options.groups = {{.patterns = {"head.*"}, .lr_scale = 0.5, .weight_decay = 0.125}};
  options.implementation = GENERATE(OptimizerImplementation::List, OptimizerImplementation::Flat);
  options.adapt_norm_and_bias = GENERATE(false, true);
  return options;
}

}  // namespace

TEST_CASE("LARS takes the steps of its paper", "[optim]") {
  const OptimizerOptions options = trust_options(OptimizerType::Lars);
  check(options, options.adapt_norm_and_bias, lars);
}

TEST_CASE("LAMB takes the steps of its paper", "[optim]") {
  const OptimizerOptions options = trust_options(OptimizerType::Lamb);
  check(options, options.adapt_norm_and_bias, lamb);
}

// float32 can represent 1e20, but not its square.
TEST_CASE("Trust ratios are right where float32 cannot hold a square", "[optim]") {
  const bool is_lars = GENERATE(true, false);
  const auto implementation =
      GENERATE(OptimizerImplementation::List, OptimizerImplementation::Flat);
  const double weight_scale = is_lars ? GENERATE(1.0, 1e20) : 1e20;
  // LAMB stores squares of gradients in float32, like Adam.
  const double gradient_scale = is_lars ? 1e20 : 1.0;
  OptimizerOptions options;
  options.type = is_lars ? OptimizerType::Lars : OptimizerType::Lamb;
  options.momentum = 0.9;
  options.weight_decay = 0.5;
  options.trust_coefficient = 0.25;
  options.implementation = implementation;
  const auto scaled = [](const at::Tensor& tensor, double scale) {
    return (tensor.detach().to(at::kDouble) * scale).to(at::kFloat);
  };
  const NamedParameters parameters = {
      {"fc.weight", scaled(weights({7, 13}, 0), weight_scale).requires_grad_()}};
  const at::Tensor& weight = parameters[0].tensor;
  Reference reference{.w = weight.detach().to(at::kDouble),
                      .m = at::zeros({7, 13}, at::kDouble),
                      .v = at::zeros({7, 13}, at::kDouble),
                      .weight_decay = options.weight_decay,
                      .lr_scale = 1.0,
                      .adapts = true};
  auto optimizer = ddp::make_optimizer(parameters, options);
  for (int64_t step = 0; step < 3; ++step) {
    const at::Tensor g = scaled(gradient({7, 13}, 0, step), gradient_scale);
    weight.mutable_grad() = g;
    optimizer->step(kLr);
    (is_lars ? lars : lamb)(reference, g.to(at::kDouble), options, step + 1);
  }
  INFO((is_lars ? "LARS" : "LAMB") << ", weights times " << weight_scale);
  CHECK(ulps(weight.detach().to(at::kDouble) / weight_scale, reference.w / weight_scale) <= 8.0);
}

TEST_CASE("A trust coefficient of 0 is refused", "[optim]") {
  OptimizerOptions options;
  options.type = OptimizerType::Lars;
  options.trust_coefficient = 0.0;
  CHECK(contains(message_of<ddp::SettingsError>([&] { ddp::make_optimizer(layers(), options); }),
                 "optimizer.trust_coefficient is 0"));
}
