// SPDX-License-Identifier: Apache-2.0
#include "ddp/amp/amp.hpp"

#include <torch/torch.h>

#include "amp/unscale.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "support/catch.hpp"
#include "unit/optim/optim_test_support.hpp"

using namespace optim_test;
using ddp::AmpDtype;
using ddp::AmpOptions;
using ddp::GradScaler;
using ddp::GradScaling;

namespace {

AmpOptions enabled(double init_scale = 1024.0) {
  AmpOptions options;
  options.grad_scaling = GradScaling::On;
  options.init_scale = init_scale;
  options.growth_interval = 2;
  return options;
}

struct Fixture {
  explicit Fixture(at::ScalarType dtype = at::kFloat)
      : weight(at::ones({3}, dtype).requires_grad_()),
        optimizer(ddp::make_optimizer({{"w", weight}}, {})) {}

  void backward(GradScaler& scaler) { scaler.scale(weight.sum()).backward(); }

  at::Tensor weight;
  std::unique_ptr<ddp::Optimizer> optimizer;
};

std::string error_of(const std::function<void()>& f) {
  const std::string message = message_of<ddp::Error>(f);
  CHECK(contains(message, "GradScaler"));
  return message;
}

}  // namespace

TEST_CASE("the scaler is on for fp16 and off for bf16 unless set", "[amp]") {
  AmpOptions options;
  CHECK_FALSE(GradScaler(options).is_enabled());
  options.dtype = AmpDtype::Bf16;
  CHECK_FALSE(GradScaler(options).is_enabled());
  options.dtype = AmpDtype::Fp16;
  CHECK(GradScaler(options).is_enabled());
  CHECK(GradScaler(options).get_scale() == 65536.0);
  options.grad_scaling = GradScaling::Off;
  CHECK_FALSE(GradScaler(options).is_enabled());
}

TEST_CASE("a disabled scaler passes everything through", "[amp]") {
  GradScaler scaler;
  Fixture f;
  const at::Tensor loss = f.weight.sum();
  CHECK(scaler.scale(loss).is_same(loss));
  scaler.scale(loss).backward();
  scaler.unscale_(*f.optimizer);
  scaler.unscale_(*f.optimizer);
  scaler.step(*f.optimizer, 0.25);
  scaler.step(*f.optimizer, 0.25);
  scaler.update();
  CHECK(at::equal(f.weight.detach(), at::full({3}, 0.5F)));
  CHECK(scaler.get_scale() == 1.0);
  CHECK(scaler.state_dict().values.empty());
  scaler.load_state_dict({});
}

TEST_CASE("a step without a rate keeps that of a wrapped optimizer", "[amp]") {
  for (const auto& options : {AmpOptions(), enabled()}) {
    GradScaler scaler(options);
    Fixture f;
    const auto inner = std::make_shared<torch::optim::SGD>(std::vector<at::Tensor>{f.weight}, 0.25);
    const auto optimizer = ddp::wrap_optimizer(inner, {{"w", f.weight}});
    f.backward(scaler);
    scaler.step(*optimizer);
    scaler.update();
    CHECK(at::equal(f.weight.detach(), at::full({3}, 0.75F)));
  }
}

TEST_CASE("unscale_, clip and step compose", "[amp]") {
  GradScaler scaler(enabled());
  Fixture f;
  f.backward(scaler);
  CHECK(at::equal(f.weight.grad(), at::full({3}, 1024.0F)));
  scaler.unscale_(*f.optimizer);
  CHECK(at::equal(f.weight.grad(), at::ones({3})));
  const at::Tensor norm = ddp::clip_grad_norm_(f.optimizer->named_parameters(), 0.5);
  CHECK(norm.item<float>() == Approx(std::sqrt(3.0)));
  scaler.step(*f.optimizer, 1.0);
  scaler.update();
  CHECK(f.weight[0].item<float>() == Approx(1.0 - 0.5 / std::sqrt(3.0)).epsilon(1e-6));
}

// All factors except the clip factor are powers of two: results differ by at most one rounding.
TEST_CASE("clip_and_step equals unscale_, clip_grad_norm_ and step", "[amp]") {
  const auto implementation =
      GENERATE(ddp::OptimizerImplementation::List, ddp::OptimizerImplementation::Flat);
  const bool is_enabled = GENERATE(false, true);
  const double max_norm = GENERATE(0.0, 0.25, 100.0);
  ddp::OptimizerOptions options;
  options.momentum = 0.5;
  options.implementation = implementation;
  const auto make_scaler = [&] { return GradScaler(is_enabled ? enabled() : AmpOptions()); };
  GradScaler apart_scaler = make_scaler();
  GradScaler one_scaler = make_scaler();
  Fixture apart;
  Fixture one;
  apart.optimizer = ddp::make_optimizer({{"w", apart.weight}}, options);
  one.optimizer = ddp::make_optimizer({{"w", one.weight}}, options);
  for (int step = 0; step < 6; ++step) {
    const bool overflows = is_enabled && step == 2;
    const auto backward = [&](Fixture& f, GradScaler& scaler) {
      f.optimizer->zero_grad();
      const at::Tensor factors = at::tensor({1.0F, -2.0F, overflows ? 1e38F : 0.5F});
      scaler.scale((f.weight * factors).sum()).backward();
    };
    backward(apart, apart_scaler);
    apart_scaler.unscale_(*apart.optimizer);
    const at::Tensor norm = ddp::clip_grad_norm_(apart.optimizer->named_parameters(), max_norm);
    apart_scaler.step(*apart.optimizer, 0.125);
    apart_scaler.update();
    backward(one, one_scaler);
    const ddp::GradientScan scan =
        one_scaler.clip_and_step(*one.optimizer, {.lr = 0.125}, max_norm);
    one_scaler.update();
    CHECK(ulps(one.weight, apart.weight) <= 2.0);
    if (overflows) {
      CHECK(scan.found_inf.item<float>() == 1.0F);
    } else {
      CHECK(scan.norm.item<double>() == Approx(norm.item<double>()).epsilon(1e-6));
    }
  }
  CHECK(one_scaler.get_scale() == apart_scaler.get_scale());
  CHECK(one.optimizer->non_finite_report().parameter == (is_enabled ? "w" : ""));
}

// Scaled gradients of 1e20 have squares beyond float32.
TEST_CASE("clip_and_step measures unscaled gradients, whatever the scale is", "[amp]") {
  Fixture f;
  GradScaler scaler(enabled(1e20));
  ddp::OptimizerOptions options;
  std::unique_ptr<ddp::Optimizer> optimizer;
  SECTION("list") {
    options.implementation = ddp::OptimizerImplementation::List;
    optimizer = ddp::make_optimizer({{"w", f.weight}}, options);
  }
  SECTION("flat") {
    options.implementation = ddp::OptimizerImplementation::Flat;
    optimizer = ddp::make_optimizer({{"w", f.weight}}, options);
  }
  SECTION("torch") {
    optimizer = ddp::wrap_optimizer(
        std::make_shared<torch::optim::SGD>(std::vector{f.weight}, torch::optim::SGDOptions(1.0)),
        ddp::NamedParameters{{"w", f.weight}});
  }
  f.backward(scaler);
  const ddp::GradientScan scan = scaler.clip_and_step(*optimizer, {.lr = 1.0}, 0.5);
  scaler.update();
  CHECK(scan.norm.item<double>() == Approx(std::sqrt(3.0)).epsilon(1e-6));
  CHECK(scan.found_inf.item<float>() == 0.0F);
  CHECK(f.weight[0].item<double>() == Approx(1.0 - 0.5 / std::sqrt(3.0)).epsilon(1e-6));
}

TEST_CASE("clip_and_step writes no gradient", "[amp]") {
  const std::string kind = GENERATE("list", "flat", "torch");
  const bool is_enabled = GENERATE(false, true);
  const auto type = GENERATE(ddp::OptimizerType::Sgd, ddp::OptimizerType::AdamW,
                             ddp::OptimizerType::Lars, ddp::OptimizerType::Lamb);
  CAPTURE(kind, is_enabled, type);
  GradScaler scaler(is_enabled ? enabled() : AmpOptions());
  Fixture f;
  ddp::OptimizerOptions options;
  options.type = type;
  options.implementation =
      kind == "list" ? ddp::OptimizerImplementation::List : ddp::OptimizerImplementation::Flat;
  f.optimizer =
      kind == "torch"
          ? ddp::wrap_optimizer(std::make_shared<torch::optim::SGD>(std::vector{f.weight}, 1.0),
                                {{"w", f.weight}})
          : ddp::make_optimizer({{"w", f.weight}}, options);
  f.backward(scaler);
  const at::Tensor gradient = f.weight.grad();
  const at::Tensor before = gradient.clone();
  scaler.clip_and_step(*f.optimizer, {.lr = 1.0}, 0.5);
  scaler.update();
  CHECK(f.weight.grad().is_same(gradient));
  CHECK(at::equal(gradient, before));
  CHECK_FALSE(at::equal(f.weight.detach(), at::ones({3})));
}

TEST_CASE("clip_and_step clips float64 gradients in float64", "[amp]") {
  const bool is_wrapped = GENERATE(false, true);
  GradScaler scaler;
  Fixture f(at::kDouble);
  if (is_wrapped) {
    f.optimizer = ddp::wrap_optimizer(
        std::make_shared<torch::optim::SGD>(std::vector{f.weight}, 1.0), {{"w", f.weight}});
  }
  f.weight.sum().backward();
  scaler.clip_and_step(*f.optimizer, {.lr = 1.0}, 0.1);
  const double expected = 1.0 - 0.1 / (std::sqrt(3.0) + 1e-6);
  CHECK(f.weight[0].item<double>() == Approx(expected).epsilon(1e-15).margin(0));
}

TEST_CASE("clip_and_step skips non-finite steps on request", "[amp]") {
  const bool skips = GENERATE(false, true);
  const double max_norm = GENERATE(0.0, 1.0);
  GradScaler scaler;
  Fixture f;
  f.weight.sum().backward();
  scaler.clip_and_step(*f.optimizer, {.lr = 1.0}, max_norm, skips);
  const at::Tensor before = f.weight.detach().clone();
  CHECK(before[0].item<float>() < 1.0F);
  f.weight.mutable_grad()[1] = std::numeric_limits<float>::infinity();
  scaler.clip_and_step(*f.optimizer, {.lr = 1.0}, max_norm, skips);
  CHECK(at::equal(f.weight.detach(), before) == skips);
}

TEST_CASE("clip_and_step cannot follow unscale_ or step", "[amp]") {
  GradScaler scaler(enabled());
  Fixture f;
  const auto clip = [&] { scaler.clip_and_step(*f.optimizer, {.lr = 0.1}, 1.0); };
  CHECK(contains(error_of(clip), "scale(loss) was not called"));
  f.backward(scaler);
  scaler.unscale_(*f.optimizer);
  CHECK(contains(error_of(clip), "called after unscale_()"));
  scaler.step(*f.optimizer, 0.1);
  CHECK(contains(error_of(clip), "called after step()"));
  scaler.update();
  f.optimizer->zero_grad();
  CHECK(contains(error_of(clip), "no inf checks were recorded"));
}

TEST_CASE("misuse is refused with PyTorch's messages", "[amp]") {
  GradScaler scaler(enabled());
  Fixture f;
  CHECK(contains(error_of([&] { scaler.unscale_(*f.optimizer); }), "scale(loss) was not called"));
  CHECK(contains(error_of([&] { scaler.step(*f.optimizer, 0.1); }), "scale(loss) was not called"));
  CHECK(contains(error_of([&] { scaler.update(); }), "scale(loss) was not called"));
  f.backward(scaler);
  CHECK(
      contains(error_of([&] { scaler.update(); }), "no inf checks were recorded prior to update"));
  scaler.unscale_(*f.optimizer);
  CHECK(contains(error_of([&] { scaler.unscale_(*f.optimizer); }), "already been called"));
  scaler.step(*f.optimizer, 0.1);
  CHECK(contains(error_of([&] { scaler.unscale_(*f.optimizer); }), "called after step()"));
  CHECK(contains(error_of([&] { scaler.step(*f.optimizer, 0.1); }),
                 "step() has already been called"));
  scaler.update();
  f.optimizer->zero_grad();
  CHECK(contains(error_of([&] { scaler.step(*f.optimizer, 0.1); }), "no inf checks were recorded"));
}

TEST_CASE("fp16 gradients: an error in unscale_, unscaled in float32 by step", "[amp]") {
  GradScaler scaler(enabled(65536.0));
  Fixture f(at::kHalf);
  scaler.scale(at::zeros({}));  // creates the scale
  // 1024 / 65536 = 2^-6, and 2^-20 / 65536, which is below fp16's range.
  f.weight.mutable_grad() = at::tensor({1024.0F, 1.0F, 9.5367431640625e-07F}).to(at::kHalf);
  CHECK(contains(error_of([&] { scaler.unscale_(*f.optimizer); }), "FP16 gradients"));
  scaler.step(*f.optimizer, 1.0);
  const ddp::StateDict state = f.optimizer->state_dict();
  const at::Tensor master = state.tensors.at("state.w.master");
  CHECK(at::equal(master, at::tensor({1.0F - 0.015625F, 1.0F - 1.0F / 65536.0F, 1.0F})));
  scaler.update();
  f.weight.mutable_grad() = at::full({3}, 70000.0F).to(at::kHalf);  // inf
  scaler.step(*f.optimizer, 1.0);
  scaler.update();
  CHECK(at::equal(f.optimizer->state_dict().tensors.at("state.w.master"), master));
  CHECK(scaler.get_scale() == 32768.0);
}

TEST_CASE("clip_and_step of a wrapped optimizer refuses fp16 gradients", "[amp]") {
  GradScaler scaler(enabled());
  Fixture f(at::kHalf);
  const auto wrapped = ddp::wrap_optimizer(
      std::make_shared<torch::optim::SGD>(std::vector{f.weight}, torch::optim::SGDOptions(1.0)),
      ddp::NamedParameters{{"w", f.weight}});
  f.backward(scaler);
  CHECK(contains(error_of([&] { scaler.clip_and_step(*wrapped, {.lr = 1.0}, 0.5); }),
                 "attempting to unscale FP16 gradients"));
  CHECK(at::equal(f.weight.detach(), at::ones({3}, at::kHalf)));
}

TEST_CASE("bf16 gradients are unscaled in place", "[amp]") {
  GradScaler scaler(enabled());
  Fixture f(at::kBFloat16);
  f.backward(scaler);
  scaler.unscale_(*f.optimizer);
  CHECK(at::equal(f.weight.grad(), at::ones({3}, at::kBFloat16)));
}

TEST_CASE("unscaling from elementary operations equals ATen's kernel", "[amp]") {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const double bad : {0.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
      INFO(c10::toString(dtype) << " with " << bad);
      torch::manual_seed(5);
      std::vector<at::Tensor> mine{at::randn({7, 3}).to(dtype), at::randn({1}).to(dtype)};
      mine[1].add_(bad);
      std::vector<at::Tensor> kernels{mine[0].clone(), mine[1].clone()};
      const auto inverse_scale = at::full({}, 1.0 / 3.0, at::kFloat);  // not a power of two
      auto found = at::zeros({}, at::kFloat);
      auto found_by_kernel = at::zeros({}, at::kFloat);
      ddp::detail::check_and_unscale_composed_(mine, found, inverse_scale);
      at::_amp_foreach_non_finite_check_and_unscale_(kernels, found_by_kernel, inverse_scale);
      CHECK(found.item<float>() == (std::isfinite(bad) ? 0.0F : 1.0F));
      CHECK(at::equal(found, found_by_kernel));
      CHECK(at::equal(mine[0], kernels[0]));
      CHECK(at::allclose(mine[1], kernels[1], 0, 0, /*equal_nan=*/true));
      // found_inf keeps its value.
      std::vector<at::Tensor> good{at::ones({2}, dtype)};
      ddp::detail::check_and_unscale_composed_(good, found, inverse_scale);
      CHECK(at::equal(found, found_by_kernel));
    }
  }
}

TEST_CASE("scaler state has PyTorch's keys and resumes exactly", "[amp]") {
  const auto train = [](GradScaler& scaler, Fixture& f, int from, int to) {
    for (int step = from; step < to; ++step) {
      f.optimizer->zero_grad();
      f.backward(scaler);
      if (step == 3) {
        f.weight.mutable_grad().fill_(std::numeric_limits<float>::quiet_NaN());
      }
      scaler.step(*f.optimizer, 0.125);
      scaler.update();
    }
  };
  GradScaler whole(enabled());
  Fixture f;
  train(whole, f, 0, 5);
  const ddp::StateDict saved = whole.state_dict();
  CHECK(whole.state_name() == "scaler");
  CHECK(std::get<double>(saved.values.at("scale")) == 1024.0);  // grown at step 2, halved at step 3
  CHECK(std::get<int64_t>(saved.values.at("_growth_tracker")) == 1);
  train(whole, f, 5, 8);

  const bool already_used = GENERATE(false, true);
  GradScaler resumed(enabled(8.0));
  Fixture g;
  if (already_used) {
    g.backward(resumed);
    g.optimizer->zero_grad();
  }
  resumed.load_state_dict(saved);
  train(resumed, g, 5, 8);
  const bool equal = resumed.state_dict().values == whole.state_dict().values;
  CHECK(equal);

  CHECK(contains(message_of<ddp::MismatchError>([&] { resumed.load_state_dict({}); }), "empty"));
  ddp::StateDict wrong = saved;
  wrong.values.erase("growth_factor");
  CHECK(contains(message_of<ddp::MismatchError>([&] { resumed.load_state_dict(wrong); }),
                 "growth_factor is missing"));
}

TEST_CASE("the scale can be set manually", "[amp]") {
  GradScaler scaler(enabled());
  scaler.scale(at::zeros({}));
  scaler.update(4.0);
  CHECK(scaler.get_scale() == 4.0);
  CHECK(at::equal(scaler.scale({at::ones({2}), at::full({1}, 2.0F)})[1], at::full({1}, 8.0F)));
}

TEST_CASE("wrong scaler settings are refused by name", "[amp]") {
  const auto refusal = [](AmpOptions options) {
    return message_of<ddp::SettingsError>([&] { GradScaler{options}; });
  };
  AmpOptions options = enabled();
  options.growth_factor = 1.0;
  CHECK(contains(refusal(options), "amp.growth_factor is 1"));
  options = enabled();
  options.backoff_factor = 1.0;
  CHECK(contains(refusal(options), "amp.backoff_factor is 1"));
  options = enabled(0.0);
  CHECK(contains(refusal(options), "amp.init_scale is 0"));
  options = enabled();
  options.growth_interval = 0;
  CHECK(contains(refusal(options), "amp.growth_interval is 0"));
}
