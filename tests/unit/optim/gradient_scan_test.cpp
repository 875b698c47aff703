// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "ddp/optim/make_optimizer.hpp"
#include "support/catch.hpp"
#include "unit/optim/optim_test_support.hpp"

using namespace optim_test;
using ddp::GradientScan;
using ddp::NamedParameters;
using ddp::OptimizerImplementation;
using ddp::OptimizerOptions;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Fixture {
  Fixture()
      : parameters{{"a", weights({70, 70}, 0)},
                   {"b", weights({5}, 1)},
                   {"c", weights({3}, 2).detach().to(at::kBFloat16).requires_grad_()}},
        optimizer(ddp::make_optimizer(parameters, [] {
          OptimizerOptions options;
          options.implementation =
              GENERATE(OptimizerImplementation::List, OptimizerImplementation::Flat);
          return options;
        }())) {
    for (const auto& [name, tensor] : parameters) {
      tensor.mutable_grad() = at::zeros(tensor.sizes(), tensor.options());
    }
  }
  at::Tensor& grad(size_t k) { return parameters[k].tensor.mutable_grad(); }

  NamedParameters parameters;
  std::unique_ptr<ddp::Optimizer> optimizer;
};

}  // namespace

TEST_CASE("A scan measures, limits and finds nothing in finite gradients", "[optim]") {
  Fixture f;
  f.grad(0)[69][69] = 24.0F;  // in the second chunk
  f.grad(1)[2] = -24.0F;
  f.grad(2)[1] = 32.0F;  // 8 * (3, 3, 4), norm 8 * sqrt(34)
  const double norm = 4.0 * std::sqrt(34.0);
  const at::Tensor before = f.grad(0).clone();
  const bool on_device = GENERATE(false, true);
  const GradientScan scan = f.optimizer->scan_gradients(
      on_device ? ddp::StepScalar(at::scalar_tensor(0.5F)) : ddp::StepScalar(0.5), 2.0);
  CHECK(scan.norm.item<double>() == Approx(norm).epsilon(1e-6));
  CHECK(scan.clip_factor.item<double>() == Approx(2.0 / (norm + 1e-6)).epsilon(1e-6));
  CHECK(scan.found_inf.item<float>() == 0.0F);
  CHECK(scan.first_non_finite.item<int>() == -1);
  CHECK(at::equal(f.grad(0), before));
  CHECK(f.optimizer->scan_gradients({}, 100.0).clip_factor.item<float>() == 1.0F);
  CHECK(f.optimizer->scan_gradients().clip_factor.item<float>() == 1.0F);
  CHECK(f.optimizer->scan_gradients().norm.item<double>() ==
        Approx(ddp::clip_grad_norm_(f.parameters, 0.0).item<double>()).epsilon(1e-6));
  CHECK(f.optimizer->non_finite_report().num_scans == 0);
}

TEST_CASE("A scan names the first parameter that is not finite", "[optim]") {
  Fixture f;
  int64_t num_scans = 0;
  for (const float value : {kInfinity, -kInfinity, kNan}) {
    CAPTURE(value);
    f.grad(1)[4] = value;
    f.grad(2)[0] = value;
    const GradientScan scan = f.optimizer->scan_gradients({}, 1.0);
    CHECK(scan.found_inf.item<float>() == 1.0F);
    CHECK(scan.first_non_finite.item<int>() == 1);
    CHECK_FALSE(std::isfinite(scan.norm.item<float>()));
    // Factors of torch.nn.utils.clip_grad_norm_: 0 for an infinite norm, NaN for NaN.
    const auto factor = scan.clip_factor.item<float>();
    CHECK((std::isnan(value) ? std::isnan(factor) : factor == 0.0F));
    f.grad(1).zero_();
    CHECK(f.optimizer->scan_gradients().first_non_finite.item<int>() == 2);
    f.grad(2).zero_();
    CHECK(f.optimizer->scan_gradients().found_inf.item<float>() == 0.0F);
    num_scans += 2;
    const ddp::NonFiniteReport report = f.optimizer->non_finite_report();
    CHECK(report.num_scans == num_scans);
    CHECK(report.parameter == "c");
  }
}

// An infinite norm would make the clip factor, and so the update, 0.
TEST_CASE("Gradients whose squares float32 does not hold are measured and clipped", "[optim]") {
  Fixture f;
  f.grad(0)[0][0] = 3e30F;
  f.grad(0)[69][69] = -4e30F;
  const GradientScan scan = f.optimizer->scan_gradients({}, 2.0);
  CHECK(scan.found_inf.item<float>() == 0.0F);
  CHECK(scan.norm.item<double>() == Approx(5e30).epsilon(1e-6));
  CHECK(scan.clip_factor.item<double>() == Approx(4e-31).epsilon(1e-6));
  const GradientScan scaled = f.optimizer->scan_gradients(1e-30, 2.0);
  CHECK(scaled.norm.item<double>() == Approx(5.0).epsilon(1e-6));
  CHECK(scaled.clip_factor.item<double>() == Approx(0.4).epsilon(1e-6));
  f.grad(0).fill_(3e38F);  // the norm exceeds float32
  CHECK(f.optimizer->scan_gradients({}, 2.0).clip_factor.item<double>() ==
        Approx(2.0 / 3e38 / 70).epsilon(1e-3));
}

TEST_CASE("Undefined gradients do not count in a scan", "[optim]") {
  Fixture f;
  f.grad(0).fill_(kNan);
  f.grad(0).reset();
  f.grad(1)[0] = 3.0F;
  const GradientScan scan = f.optimizer->scan_gradients();
  CHECK(scan.norm.item<float>() == 3.0F);
  CHECK(scan.found_inf.item<float>() == 0.0F);
}

TEST_CASE("A scan of float64 weights measures, unscales and clips in float64", "[optim]") {
  const auto weight = at::zeros({3}, at::kDouble).requires_grad_();
  const auto optimizer = ddp::make_optimizer(NamedParameters{{"w", weight}}, OptimizerOptions{});
  weight.mutable_grad() = at::tensor({1.0, 1.0, 1.0}, at::kDouble);
  const GradientScan scan = optimizer->scan_gradients(1.0 / 3.0, 0.1);
  const double norm = std::sqrt(3.0) / 3.0;
  CHECK(scan.norm.item<double>() == Approx(norm).epsilon(1e-12));
  CHECK(scan.clip_factor.item<double>() == Approx(0.1 / (norm + 1e-6)).epsilon(1e-12));
}
