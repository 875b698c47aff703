// SPDX-License-Identifier: Apache-2.0
// Compares with torch.amp.GradScaler: tests/golden/make_scaler_golden.py. All numbers must be ==.
#include <torch/torch.h>

#include "ddp/amp/amp.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "support/catch.hpp"
#include "unit/optim/optim_test_support.hpp"

using namespace optim_test;

namespace {

constexpr double kLr = 0.0625;

at::Tensor coefficients(int64_t step, int64_t k) {
  std::vector<float> values;
  for (int64_t i = 0; i < 4; ++i) {
    values.push_back(static_cast<float>((i * 7 + step * 5 + k * 3) % 23 - 11) / 16.0F);
  }
  return at::tensor(values);
}

ddp::AmpOptions options_of(const nlohmann::json& json) {
  ddp::AmpOptions options;
  options.grad_scaling = ddp::GradScaling::On;
  options.init_scale = json.value("init_scale", options.init_scale);
  options.growth_factor = json.value("growth_factor", options.growth_factor);
  options.backoff_factor = json.value("backoff_factor", options.backoff_factor);
  options.growth_interval = json.value("growth_interval", options.growth_interval);
  return options;
}

// Reads found_inf on the device (libddp's), or on the host (torch::optim's through the adapter).
std::unique_ptr<ddp::Optimizer> make_sgd(const ddp::NamedParameter& parameter, bool on_device) {
  if (on_device) {
    return ddp::make_optimizer({parameter}, {});
  }
  auto sgd = std::make_shared<torch::optim::SGD>(std::vector<at::Tensor>{parameter.tensor},
                                                 torch::optim::SGDOptions(kLr));
  return ddp::wrap_optimizer(sgd, ddp::NamedParameters{parameter});
}

void poison(const nlohmann::json& infs, int64_t step, const ddp::NamedParameters& parameters) {
  const std::string key = std::to_string(step);
  if (!infs.contains(key)) {
    return;
  }
  for (const auto& inf : infs[key]) {
    const auto k = inf[0].get<size_t>();
    const double value = std::stod(inf[2].get<std::string>());
    parameters[k].tensor.mutable_grad()[inf[1].get<int64_t>()] = value;
  }
}

void check_state(const ddp::StateDict& state, const nlohmann::json& expected) {
  CHECK(state.values.size() == 5);
  for (const char* key : {"scale", "growth_factor", "backoff_factor"}) {
    CHECK(std::get<double>(state.values.at(key)) == expected[key].get<double>());
  }
  for (const char* key : {"growth_interval", "_growth_tracker"}) {
    CHECK(std::get<int64_t>(state.values.at(key)) == expected[key].get<int64_t>());
  }
}

void run_case(const nlohmann::json& golden, bool on_device) {
  const auto num_optimizers = golden["num_optimizers"].get<size_t>();
  const auto unscale_first = golden["unscale_first"].get<size_t>();
  ddp::GradScaler scaler(options_of(golden["options"]));
  ddp::NamedParameters parameters;
  std::vector<std::unique_ptr<ddp::Optimizer>> optimizers;
  for (size_t k = 0; k < num_optimizers; ++k) {
    parameters.push_back({std::to_string(k), at::ones({4}).requires_grad_()});
    optimizers.push_back(make_sgd(parameters.back(), on_device));
  }
  for (size_t step = 0; step < golden["trace"].size(); ++step) {
    INFO("step " << step);
    const auto now = static_cast<int64_t>(step);
    const nlohmann::json& expected = golden["trace"][step];
    at::Tensor loss = at::zeros({});
    for (size_t k = 0; k < num_optimizers; ++k) {
      optimizers[k]->zero_grad();
      loss = loss + (parameters[k].tensor * coefficients(now, static_cast<int64_t>(k))).sum();
    }
    const at::Tensor scaled = scaler.scale(loss);
    CHECK(scaler.get_scale() == expected["scale_before"].get<double>());
    scaled.backward();
    poison(golden["infs"], now, parameters);
    for (size_t k = 0; k < num_optimizers; ++k) {
      if ((step + k) % unscale_first == 0) {
        scaler.unscale_(*optimizers[k]);
      }
      scaler.step(*optimizers[k], kLr);
    }
    scaler.update();
    for (size_t k = 0; k < num_optimizers; ++k) {
      const auto values = expected["parameters"][k].get<std::vector<float>>();
      CHECK(at::equal(parameters[k].tensor.detach(), at::tensor(values)));
    }
    check_state(scaler.state_dict(), expected["state"]);
  }
}

}  // namespace

TEST_CASE("GradScaler follows torch.amp.GradScaler's traces exactly", "[amp]") {
  const nlohmann::json golden = read_golden("scaler_golden.json");
  REQUIRE(golden["cases"].size() == 4);
  for (const auto& [name, golden_case] : golden["cases"].items()) {
    DYNAMIC_SECTION(name << ", found_inf on the device") {
      run_case(golden_case, true);
    }
    DYNAMIC_SECTION(name << ", torch::optim through the adapter") {
      run_case(golden_case, false);
    }
  }
}
