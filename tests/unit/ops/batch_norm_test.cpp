// SPDX-License-Identifier: Apache-2.0
// BatchNorm with sum, activation and pool on a CPU compared with the formulas of arXiv:1502.03167.
#include "ddp/ops/vision.hpp"

#include <torch/torch.h>

#include "gpu/vision/batch_norm_test.hpp"
#include "support/catch.hpp"

using namespace batch_norm_test;

namespace {

torch::Tensor as_channels(const torch::Tensor& vector) {
  return vector.view({1, -1, 1, 1});
}

torch::Tensor normalised(const torch::Tensor& x, const ddp::ops::BatchNormLayer& bn) {
  auto mean = bn.running_mean;
  auto variance = bn.running_var;
  if (bn.training) {
    const std::vector<int64_t> dims = {0, 2, 3};
    mean = x.mean(dims);
    variance = (x - as_channels(mean)).square().mean(dims);
    const torch::NoGradGuard no_grad;
    const auto count = static_cast<double>(x.numel() / x.size(1));
    bn.running_mean.mul_(1 - bn.momentum).add_(mean, bn.momentum);
    bn.running_var.mul_(1 - bn.momentum).add_(variance, bn.momentum * count / (count - 1));
  }
  return (x - as_channels(mean)) / as_channels((variance + bn.eps).sqrt()) *
             as_channels(bn.weight) +
         as_channels(bn.bias);
}

torch::Tensor by_formula(const Inputs& in, Form form) {
  auto out = normalised(in.x, in.bn);
  if (form == Form::Residual) {
    out = out + in.z;
  } else if (form == Form::TwoNorms) {
    out = out + normalised(in.z, in.bn_z);
  }
  if (form == Form::Plain || form == Form::Silu) {
    return form == Form::Silu ? out / (1 + (-out).exp()) : out;
  }
  out = out.clamp_min(0);
  if (form == Form::Pool) {
    const auto padded = torch::constant_pad_nd(out, {1, 1, 1, 1}, 0);  // no value is below zero
    out = std::get<0>(padded.unfold(2, 3, 2).unfold(3, 3, 2).flatten(4).max(-1));
  }
  return out;
}

}  // namespace

TEST_CASE("batch norm with sum, activation and pool follows its formulas") {
  torch::manual_seed(5);
  for (const bool training : {true, false}) {
    for (const auto& [name, form] : forms()) {
      if (form == Form::OneHandle || form == Form::TwoNormsOneHandle ||
          form == Form::PoolOneHandle) {
        continue;
      }
      INFO(name << (training ? ", training" : ", evaluation"));
      auto inputs = make_inputs({3, 6, 8, 8}, torch::kCPU, torch::kDouble, torch::kDouble);
      inputs.bn.training = inputs.bn_z.training = training;
      auto reference = converted(inputs, torch::kDouble);
      const auto results = run(inputs, form);

      std::vector<torch::Tensor> leaves = {reference.x, reference.bn.weight, reference.bn.bias};
      if (form == Form::Residual || form == Form::TwoNorms) {
        leaves.push_back(reference.z);
      }
      if (form == Form::TwoNorms) {
        leaves.push_back(reference.bn_z.weight);
        leaves.push_back(reference.bn_z.bias);
      }
      for (auto& leaf : leaves) {
        leaf.requires_grad_(true);
      }
      const auto y = by_formula(reference, form);
      auto grad = inputs.grad;
      if (!one_handle(form)) {
        grad = grad + inputs.grad2;  // two consumers
      }
      const auto grads = torch::autograd::grad(
          {y}, leaves, {grad.narrow(2, 0, y.size(2)).narrow(3, 0, y.size(3))});
      CHECK(torch::allclose(results[0].second, y, 1e-10, 1e-12));
      for (size_t i = 0; i < grads.size(); ++i) {
        INFO(results[1 + i].first);
        CHECK(torch::allclose(results[1 + i].second, grads[i], 1e-8, 1e-11));
      }
      CHECK(torch::allclose(inputs.bn.running_mean, reference.bn.running_mean));
      CHECK(torch::allclose(inputs.bn.running_var, reference.bn.running_var));
      CHECK(torch::allclose(inputs.bn_z.running_var, reference.bn_z.running_var));
    }
  }
}

TEST_CASE("batch norm does not train on one value per channel") {
  for (const auto& [name, form] : forms()) {
    INFO(name);
    auto inputs = make_inputs({1, 6, 1, 1}, torch::kCPU, torch::kDouble, torch::kDouble);
    inputs.bn.training = inputs.bn_z.training = true;
    const auto before = converted(inputs, torch::kDouble);
    CHECK_THROWS_WITH(call(inputs, form),
                      Catch::Contains("Expected more than 1 value per channel when training"));
    CHECK(torch::equal(inputs.bn.running_mean, before.bn.running_mean));
    CHECK(torch::equal(inputs.bn.running_var, before.bn.running_var));
    inputs.bn.training = inputs.bn_z.training = false;
    CHECK_NOTHROW(call(inputs, form));
  }
}
