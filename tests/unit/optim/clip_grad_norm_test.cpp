// SPDX-License-Identifier: Apache-2.0
#include "ddp/optim/make_optimizer.hpp"

#include <torch/torch.h>

#include <cmath>

#include "support/catch.hpp"
#include "unit/optim/optim_test_support.hpp"

using namespace optim_test;
using ddp::NamedParameters;

namespace {

NamedParameters with_gradients() {
  NamedParameters parameters{
      {"a", weights({4, 3}, 0)}, {"b", weights({7}, 1)}, {"c", weights({2}, 2)}};
  for (int64_t k = 0; k < 2; ++k) {  // c has no gradient
    auto& tensor = parameters[static_cast<size_t>(k)].tensor;
    tensor.mutable_grad() = gradient(tensor.sizes(), k, 3);
  }
  return parameters;
}

std::vector<at::Tensor> tensors_of(const NamedParameters& parameters) {
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : parameters) {
    tensors.push_back(parameter.tensor);
  }
  return tensors;
}

}  // namespace

TEST_CASE("clip_grad_norm_ on a 3-4-5 triangle", "[optim]") {
  NamedParameters parameters{{"x", at::zeros({1}).requires_grad_()},
                             {"y", at::zeros({1}).requires_grad_()}};
  parameters[0].tensor.mutable_grad() = at::tensor({3.0F});
  parameters[1].tensor.mutable_grad() = at::tensor({-4.0F});
  CHECK(ddp::clip_grad_norm_(parameters, 0.0).item<float>() == 5.0F);
  CHECK(parameters[1].tensor.grad().item<float>() == -4.0F);  // 0 only measures
  CHECK(ddp::clip_grad_norm_(parameters, -1.0).item<float>() == 5.0F);
  CHECK(parameters[1].tensor.grad().item<float>() == -4.0F);
  CHECK(ddp::clip_grad_norm_(parameters, 10.0).item<float>() == 5.0F);
  CHECK(parameters[1].tensor.grad().item<float>() == -4.0F);           // below the limit
  CHECK(ddp::clip_grad_norm_(parameters, 1.0).item<float>() == 5.0F);  // the norm before clipping
  CHECK(parameters[0].tensor.grad().item<float>() == Approx(0.6).epsilon(1e-6));
  CHECK(parameters[1].tensor.grad().item<float>() == Approx(-0.8).epsilon(1e-6));
}

TEST_CASE("clip_grad_norm_ limits gradients whose powers float32 does not hold", "[optim]") {
  const double norm_type = GENERATE(1.0, 2.0, 3.0);
  NamedParameters parameters{{"x", at::zeros({1}).requires_grad_()},
                             {"y", at::zeros({1}).requires_grad_()}};
  parameters[0].tensor.mutable_grad() = at::tensor({3e25F});
  parameters[1].tensor.mutable_grad() = at::tensor({-4e25F});
  const double norm = std::pow(std::pow(3.0, norm_type) + std::pow(4.0, norm_type), 1 / norm_type);
  const at::Tensor found = ddp::clip_grad_norm_(parameters, 1.0, norm_type);
  CHECK(found.scalar_type() == at::kFloat);
  CHECK(found.item<double>() == Approx(norm * 1e25).epsilon(1e-6));
  CHECK(parameters[0].tensor.grad().item<double>() == Approx(3 / norm).epsilon(1e-6));
  CHECK(parameters[1].tensor.grad().item<double>() == Approx(-4 / norm).epsilon(1e-6));
}

TEST_CASE("clip_grad_norm_ equals torch.nn.utils.clip_grad_norm_", "[optim]") {
  const double norm_type = GENERATE(1.0, 2.0, 3.0, std::numeric_limits<double>::infinity());
  const double max_norm = GENERATE(0.5, 1000.0);
  NamedParameters ours = with_gradients();
  NamedParameters theirs = with_gradients();
  const double norm = ddp::clip_grad_norm_(ours, max_norm, norm_type).item<double>();
  const double expected =
      torch::nn::utils::clip_grad_norm_(tensors_of(theirs), max_norm, norm_type);
  CHECK(norm == Approx(expected).epsilon(1e-6));
  for (size_t k = 0; k < 2; ++k) {
    CHECK(ulps(ours[k].tensor.grad(), theirs[k].tensor.grad()) <= 2.0);
  }
  CHECK_FALSE(ours[2].tensor.grad().defined());
}

TEST_CASE("clip_grad_norm_ measures half gradients in float32", "[optim]") {
  const at::Tensor leaf = at::zeros({4096}, at::kBFloat16).requires_grad_();
  leaf.mutable_grad() = at::ones({4096}, at::kBFloat16);
  const at::Tensor norm = ddp::clip_grad_norm_({{"w", leaf}}, 32.0);
  CHECK(norm.scalar_type() == at::kFloat);
  CHECK(norm.item<float>() == 64.0F);
  CHECK(leaf.grad().scalar_type() == at::kBFloat16);
  CHECK(leaf.grad()[0].item<float>() == 0.5F);
}

TEST_CASE("clip_grad_norm_ without gradients gives 0", "[optim]") {
  CHECK(ddp::clip_grad_norm_(NamedParameters{{"w", weights({2}, 0)}}, 1.0).item<float>() == 0.0F);
  CHECK(ddp::clip_grad_norm_(NamedParameters{}, 1.0).item<float>() == 0.0F);
}

TEST_CASE("An inf gradient gives an inf norm and no exception", "[optim]") {
  NamedParameters parameters = with_gradients();
  parameters[0].tensor.mutable_grad().fill_(std::numeric_limits<float>::infinity());
  CHECK(std::isinf(ddp::clip_grad_norm_(parameters, 1.0).item<float>()));
}

TEST_CASE("Empty gradients have no part in norms and checks", "[optim]") {
  const double norm_type = GENERATE(2.0, std::numeric_limits<double>::infinity());
  const auto implementation =
      GENERATE(ddp::OptimizerImplementation::List, ddp::OptimizerImplementation::Flat);
  NamedParameters parameters{{"empty", at::zeros({0, 3}).requires_grad_()},
                             {"w", at::zeros({1}).requires_grad_()}};
  auto optimizer = ddp::make_optimizer(parameters, {.implementation = implementation});
  for (const auto& parameter : parameters) {
    parameter.tensor.mutable_grad() = at::full(parameter.tensor.sizes(), 4.0);
  }
  const ddp::GradientScan scan = optimizer->scan_gradients({}, 1.0);
  CHECK(scan.norm.item<float>() == 4.0F);
  CHECK(scan.found_inf.item<float>() == 0.0F);
  CHECK(scan.first_non_finite.item<int>() == -1);
  CHECK(ddp::clip_grad_norm_(parameters, 2.0, norm_type).item<float>() == 4.0F);
  CHECK(parameters[1].tensor.grad().item<float>() == Approx(2.0));
  parameters[1].tensor.mutable_grad().fill_(std::numeric_limits<float>::quiet_NaN());
  CHECK(optimizer->scan_gradients().first_non_finite.item<int>() == 1);
}
