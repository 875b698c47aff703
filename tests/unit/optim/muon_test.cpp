// SPDX-License-Identifier: Apache-2.0
// The updates of Muon: its formulas in float64, and what a step may and may not change.
#include <torch/torch.h>

#include "optim/muon/newton_schulz.hpp"
#include "support/catch.hpp"
#include "support/same_bits.hpp"
#include "unit/optim/muon_test_support.hpp"

using namespace optim_test;
using ddp::NamedParameters;
using ddp::OptimizerOptions;
using testing::same_bits;

namespace {

constexpr int64_t kSteps = 20;

bool is_muon(const ddp::NamedParameter& parameter) {
  return parameter.tensor.dim() > 1 && parameter.name != "head.weight";
}

OptimizerOptions grouped_options() {
  auto options = muon_options();
  options.decay_norm_and_bias = false;
  options.groups = {{.patterns = {"square", "bias"}, .lr_scale = 0.5, .weight_decay = 0.25},
                    {.patterns = {"still"}, .lr_scale = 0.0}};
  return options;
}

// [k, rows, cols], rows <= cols.
at::Tensor batch_of(int64_t k, int64_t rows, int64_t cols) {
  return normal({k, rows, cols}, 77);
}

}  // namespace

TEST_CASE("Newton-Schulz makes singular values about 1 and keeps the singular vectors", "[optim]") {
  const at::Tensor batch = batch_of(3, 12, 40);
  const at::Tensor x = ddp::detail::newton_schulz(batch, at::kDouble, 5);
  const auto [u, s, v] = at::linalg_svd(batch.to(at::kDouble), /*full_matrices=*/false);
  const at::Tensor values = at::bmm(at::bmm(u.transpose(1, 2), x), v.transpose(1, 2));
  const at::Tensor diagonal = values.diagonal(0, 1, 2);
  CHECK(diagonal.min().item<double>() > 0.6);
  CHECK(diagonal.max().item<double>() < 1.3);
  CHECK((values - at::diag_embed(diagonal)).abs().max().item<double>() < 1e-12);
}

TEST_CASE("Newton-Schulz gives a matrix the same bits beside any others", "[optim]") {
  const at::Tensor batch = batch_of(5, 12, 40);
  const at::Tensor all = ddp::detail::newton_schulz(batch, at::kBFloat16, 5);
  for (int64_t i = 0; i < 5; ++i) {
    at::Tensor others = at::zeros_like(batch);
    others[i] = batch[i];
    const at::Tensor alone = ddp::detail::newton_schulz(others, at::kBFloat16, 5);
    CHECK(same_bits(alone[i], all[i]));
    others[i].zero_();
    CHECK(ddp::detail::newton_schulz(others, at::kBFloat16, 5).abs().max().item<float>() == 0.0F);
  }
}

TEST_CASE("Muon takes the steps of its papers", "[optim]") {
  auto options = grouped_options();
  options.muon.scale = GENERATE(ddp::MuonScale::MatchRmsAdamW, ddp::MuonScale::Original);
  options.muon.nesterov = GENERATE(true, false);
  options.muon.ns_steps = GENERATE(5, 2);
  options.muon.momentum = 0.875;
  const NamedParameters parameters = muon_layers();
  std::vector<MuonReference> references;
  for (const auto& [name, tensor] : parameters) {
    const at::Tensor weight = tensor.detach().to(at::kDouble).clone();
    references.push_back({.weight = weight,
                          .momentum = at::zeros_like(weight),
                          .lr_scale = name == "still" ? 0.0 : (name == "square" ? 0.5 : 1.0),
                          .weight_decay = name == "square" ? 0.25 : options.weight_decay});
  }
  auto optimizer = make_muon_in(at::kFloat, parameters, options);
  for (int64_t step = 0; step < kSteps; ++step) {
    set_muon_gradients(parameters, step);
    for (size_t k = 0; k < parameters.size(); ++k) {
      if (is_muon(parameters[k])) {
        references[k].step(parameters[k].tensor.grad(), kLr, options.muon);
      }
    }
    optimizer->step(kLr);
  }
  const auto state = optimizer->state_dict();
  for (size_t k = 0; k < parameters.size(); ++k) {
    if (!is_muon(parameters[k])) {
      continue;
    }
    INFO(parameters[k].name);
    const at::Tensor momentum =
        state.tensors.at("state." + parameters[k].name + ".momentum_buffer");
    REQUIRE(momentum.sizes() == parameters[k].tensor.sizes());
    if (momentum.numel() > 0) {
      const at::Tensor weight = parameters[k].tensor.detach();
      // float32 has 2e-7 of a weight's or an update's size, and small singular values amplify it.
      CHECK((weight.to(at::kDouble) - references[k].weight).abs().max().item<double>() <= 1e-6);
      CHECK((momentum.to(at::kDouble) - references[k].momentum).abs().max().item<double>() <= 1e-6);
    }
  }
  CHECK(state.values.at("type") == ddp::StateValue(std::string("muon")));
}

TEST_CASE("AdamW updates what Muon does not", "[optim]") {
  auto options = grouped_options();
  options.beta1 = 0.75;
  options.beta2 = 0.875;
  options.eps = 1e-3;
  const NamedParameters all = muon_layers();
  NamedParameters rest;
  for (const auto& [name, tensor] : muon_layers()) {
    if (!is_muon({name, tensor})) {
      rest.push_back({name, tensor});
    }
  }
  auto adamw = options;
  adamw.type = ddp::OptimizerType::AdamW;
  adamw.groups = {{.patterns = {"bias"}, .lr_scale = 0.5, .weight_decay = 0.25}};
  auto muon = ddp::make_optimizer(all, options);
  auto expected = ddp::make_optimizer(rest, adamw);
  for (int64_t step = 0; step < 4; ++step) {
    set_muon_gradients(all, step);
    for (const auto& [name, tensor] : rest) {
      for (const auto& parameter : all) {
        if (parameter.name == name) {
          tensor.mutable_grad() = parameter.tensor.grad();
        }
      }
    }
    muon->step(kLr);
    expected->step(kLr);
  }
  const auto state = muon->state_dict();
  for (const auto& [key, tensor] : expected->state_dict().tensors) {
    INFO(key);
    CHECK(same_bits(state.tensors.at(key), tensor));
  }
  for (const auto& [name, tensor] : rest) {
    for (const auto& parameter : all) {
      if (parameter.name == name) {
        INFO(name);
        CHECK(same_bits(parameter.tensor.detach(), tensor.detach()));
      }
    }
  }
}

TEST_CASE("A step of Muon with scalars as tensors has the bits of one with numbers", "[optim]") {
  const NamedParameters numbers = muon_layers();
  const NamedParameters tensors = muon_layers();
  auto of_numbers = ddp::make_optimizer(numbers, grouped_options());
  auto of_tensors = ddp::make_optimizer(tensors, grouped_options());
  for (int64_t step = 0; step < 4; ++step) {
    const double lr = 0.1 / static_cast<double>(1 + step);  // float32 has no such number
    run_muon(*of_numbers, step, step + 1, {.lr = lr, .inverse_scale = 0.3, .clip_factor = 0.7});
    run_muon(*of_tensors, step, step + 1,
             {.lr = at::full({}, lr, at::kFloat),
              .inverse_scale = at::full({}, 0.3, at::kFloat),
              .found_inf = at::zeros({}),
              .clip_factor = at::full({}, 0.7, at::kFloat)});
  }
  require_same_bits(tensors, numbers);
  for (const auto& [name, tensor] : numbers) {
    if (name == "still") {
      CHECK(same_bits(tensor.detach(), muon_layers()[7].tensor.detach()));
    }
  }
}

TEST_CASE("Muon multiplies gradients by both factors and does not write them", "[optim]") {
  const NamedParameters scaled = muon_layers();
  const NamedParameters plain = muon_layers();
  auto of_scaled = ddp::make_optimizer(scaled, grouped_options());
  auto of_plain = ddp::make_optimizer(plain, grouped_options());
  for (int64_t step = 0; step < 3; ++step) {
    set_muon_gradients(scaled, step);
    set_muon_gradients(plain, step);
    for (const auto& [name, tensor] : scaled) {
      tensor.mutable_grad().mul_(1024.0);
    }
    const at::Tensor before = scaled[0].tensor.grad().clone();
    const auto scan = of_scaled->scan_gradients(1.0 / 512, 0.0);
    CHECK(scan.norm.item<double>() ==
          Approx(2 * ddp::clip_grad_norm_(plain, 0.0).item<double>()).epsilon(1e-6));
    of_scaled->step({.lr = kLr, .inverse_scale = 1.0 / 512, .clip_factor = 0.5});
    CHECK(same_bits(scaled[0].tensor.grad(), before));
    of_plain->step(kLr);
  }
  require_same_bits(scaled, plain);
  // An update does not depend on a factor that all gradients have; the momentum does.
  require_same_state(of_scaled->state_dict(), of_plain->state_dict());
}

TEST_CASE("found_inf stops all of Muon's step", "[optim]") {
  const bool on_device = GENERATE(true, false);
  const int64_t skipped = GENERATE(0, 2);
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16);
  const NamedParameters skipping = muon_layers(dtype);
  const NamedParameters plain = muon_layers(dtype);
  auto of_skipping = ddp::make_optimizer(skipping, grouped_options());
  auto of_plain = ddp::make_optimizer(plain, grouped_options());
  for (int64_t step = 0; step < 4; ++step) {
    if (step == skipped) {
      set_muon_gradients(skipping, 50);
      for (const auto& [name, tensor] : skipping) {
        tensor.mutable_grad().fill_(std::numeric_limits<float>::infinity());
      }
      const ddp::StepScalar found =
          on_device ? ddp::StepScalar(at::ones({})) : ddp::StepScalar(1.0);
      of_skipping->step({.lr = kLr, .found_inf = found});
      require_same_bits(skipping, plain);
    }
    run_muon(*of_skipping, step, step + 1, {.lr = kLr, .found_inf = at::zeros({})});
    run_muon(*of_plain, step, step + 1, {.lr = kLr});
  }
  require_same_bits(skipping, plain);
  require_same_state(of_skipping->state_dict(), of_plain->state_dict());
}

TEST_CASE("A matrix without a gradient stays, and its batch has the same bits", "[optim]") {
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16);
  const NamedParameters whole = muon_layers(dtype);
  const NamedParameters partial = muon_layers(dtype);
  auto of_whole = ddp::make_optimizer(whole, muon_options());
  auto of_partial = ddp::make_optimizer(partial, muon_options());
  const at::Tensor& tall = partial[0].tensor;
  for (int64_t step = 0; step < 5; ++step) {
    run_muon(*of_whole, step, step + 1, {.lr = kLr});
    const at::Tensor before = tall.detach().clone();
    const auto version = tall._version();
    set_muon_gradients(partial, step);
    const bool has_gradient = step == 1 || step == 3;
    if (!has_gradient) {
      tall.mutable_grad().reset();
    }
    of_partial->step(kLr);
    CHECK(same_bits(tall.detach(), before) == !has_gradient);
    CHECK((tall._version() == version) == !has_gradient);
    CHECK(of_partial->state_dict().contains("state.tall.momentum_buffer") == (step > 0));
  }
  for (size_t k = 1; k < whole.size(); ++k) {
    INFO(whole[k].name);
    CHECK(same_bits(partial[k].tensor.detach(), whole[k].tensor.detach()));
  }
  // Its steps are those of a run that never had the others.
  NamedParameters alone = muon_layers(dtype);
  auto of_alone = ddp::make_optimizer(alone, muon_options());
  for (const int64_t step : {1, 3}) {
    set_muon_gradients(alone, step);
    of_alone->step(kLr);
  }
  CHECK(same_bits(alone[0].tensor.detach(), tall.detach()));
}

TEST_CASE("Muon's half matrices have masters", "[optim]") {
  const auto dtype = GENERATE(at::kBFloat16, at::kHalf);
  NamedParameters half = muon_layers(dtype);
  NamedParameters twins;
  for (const auto& [name, tensor] : half) {
    twins.push_back({name, tensor.detach().to(at::kFloat).requires_grad_()});
  }
  auto of_half = ddp::make_optimizer(half, muon_options());
  auto of_twins = ddp::make_optimizer(twins, muon_options());
  const auto step_both = [&](int64_t step) {
    set_muon_gradients(half, step);
    for (size_t k = 0; k < half.size(); ++k) {
      twins[k].tensor.mutable_grad() = half[k].tensor.grad().to(at::kFloat);
    }
    of_half->step(0.001953125);
    of_twins->step(0.001953125);
  };
  const auto check = [&] {
    const auto state = of_half->state_dict();
    for (size_t k = 0; k < half.size(); ++k) {
      INFO(half[k].name);
      const at::Tensor& master = state.tensors.at("state." + half[k].name + ".master");
      CHECK(same_bits(master, twins[k].tensor.detach()));
      CHECK(same_bits(half[k].tensor.detach(), master.to(dtype)));
    }
  };
  for (int64_t step = 0; step < 6; ++step) {
    step_both(step);
  }
  check();
  const at::NoGradGuard no_grad;  // other code writes a row, and moves another matrix
  half[0].tensor[3].fill_(2.0);
  twins[0].tensor[3].fill_(2.0);
  half[1].tensor.set_data(half[1].tensor.detach().clone());
  step_both(6);
  check();
}

TEST_CASE("A backward through the weights of before Muon's step throws", "[optim]") {
  const NamedParameters parameters = muon_layers();
  auto optimizer = ddp::make_optimizer(parameters, muon_options());
  const at::Tensor loss = parameters[0].tensor.square().sum();
  run_muon(*optimizer, 0, 1, {.lr = kLr});
  CHECK_THROWS_WITH(loss.backward(), Catch::Matchers::Contains("modified by an inplace operation"));
}

TEST_CASE("Muon takes gradients of any dtype, memory order and stride", "[optim]") {
  const NamedParameters plain = muon_layers();
  const NamedParameters other = muon_layers();
  auto of_plain = ddp::make_optimizer(plain, muon_options());
  auto of_other = ddp::make_optimizer(other, muon_options());
  for (int64_t step = 0; step < 3; ++step) {
    set_muon_gradients(plain, step);
    for (size_t k = 0; k < plain.size(); ++k) {
      at::Tensor gradient = plain[k].tensor.grad().to(at::kBFloat16).to(at::kFloat);
      plain[k].tensor.mutable_grad() = gradient;
      if (gradient.dim() == 2) {
        gradient = gradient.t().contiguous().t();
      } else if (gradient.dim() == 4) {
        gradient = gradient.contiguous(at::MemoryFormat::ChannelsLast);
      }
      other[k].tensor.mutable_grad() = gradient;
    }
    of_plain->step(kLr);
    of_other->step(kLr);
  }
  require_same_bits(other, plain);
}

TEST_CASE("A matrix with holes in memory and one of float64 take Muon's steps", "[optim]") {
  const at::Tensor values = normal({5, 3}, 3);
  const at::Tensor storage = at::zeros({5, 8});
  storage.narrow(1, 0, 3).copy_(values);
  const NamedParameters sliced{{"w", storage.narrow(1, 0, 3).detach().requires_grad_()}};
  const NamedParameters dense{{"w", values.clone().requires_grad_()}};
  const NamedParameters wide{{"w", values.to(at::kDouble).requires_grad_()}};
  for (const auto* parameters : {&sliced, &dense, &wide}) {
    auto optimizer =
        make_muon_in(parameters == &wide ? at::kDouble : at::kFloat, *parameters, muon_options());
    run_muon(*optimizer, 0, kSteps, {.lr = kLr});
  }
  CHECK(same_bits(sliced[0].tensor.detach(), dense[0].tensor.detach()));
  CHECK(storage.narrow(1, 3, 5).eq(0).all().item<bool>());
  CHECK((wide[0].tensor - dense[0].tensor).abs().max().item<double>() <= 1e-6);
}
