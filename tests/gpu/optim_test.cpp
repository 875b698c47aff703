// SPDX-License-Identifier: Apache-2.0
// Optimizers, clipping and GradScaler on one GPU: the CPU's numbers, no host wait in a step, and
// the bits of an eager step in a captured one.
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/torch.h>

#include "ddp/amp/amp.hpp"
#include "ddp/optim/ema.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "support/catch.hpp"
#include "unit/optim/optim_test_support.hpp"

using namespace optim_test;
using ddp::NamedParameters;
using ddp::OptimizerOptions;
using ddp::OptimizerType;

namespace {

struct Rule {
  std::string name;
  OptimizerOptions options;
};

std::vector<Rule> rules() {
  OptimizerOptions sgd;
  sgd.weight_decay = 0.01;
  OptimizerOptions nesterov = sgd;
  nesterov.momentum = 0.9;
  nesterov.nesterov = true;
  nesterov.decay_norm_and_bias = false;
  OptimizerOptions dampened;
  dampened.momentum = 0.8;
  dampened.dampening = 0.3;
  OptimizerOptions adam = sgd;
  adam.type = OptimizerType::Adam;
  OptimizerOptions adamw = adam;
  adamw.type = OptimizerType::AdamW;
  adamw.amsgrad = true;
  adamw.groups = {{.patterns = {"bias"}, .lr_scale = 0.5, .weight_decay = 0.0}};
  return {{"sgd", sgd},
          {"nesterov", nesterov},
          {"dampened", dampened},
          {"adam", adam},
          {"adamw", adamw}};
}

// Muon's bfloat16 products differ between CPU and GPU.
OptimizerOptions muon() {
  OptimizerOptions options;
  options.type = OptimizerType::Muon;
  options.weight_decay = 0.01;
  options.groups = {{.patterns = {"half"}, .lr_scale = 0.5, .weight_decay = 0.0}};
  return options;
}

std::vector<Rule> rules_and_muon() {
  std::vector<Rule> all = rules();
  all.push_back({"muon", muon()});
  return all;
}

NamedParameters make_parameters(at::Device device) {
  const auto leaf = [&](at::IntArrayRef shape, int64_t k, at::ScalarType dtype) {
    return weights(shape, k).detach().to(device, dtype).requires_grad_();
  };
  at::Tensor conv = leaf({8, 4, 3, 3}, 0, at::kFloat);
  return {{"conv", conv.detach().contiguous(at::MemoryFormat::ChannelsLast).requires_grad_()},
          {"bias", leaf({33}, 1, at::kFloat)},
          {"half", leaf({16, 5}, 2, at::kBFloat16)}};
}

at::Tensor gradient_of(const ddp::NamedParameter& parameter, size_t k, int64_t step) {
  return gradient(parameter.tensor.sizes(), static_cast<int64_t>(k), step)
      .to(parameter.tensor.device());
}

void set_device_gradients(const NamedParameters& parameters, int64_t step) {
  for (size_t k = 0; k < parameters.size(); ++k) {
    parameters[k].tensor.mutable_grad() = gradient_of(parameters[k], k, step);
  }
}

// Makes host waits throw for its lifetime.
class RefuseHostWaits {
 public:
  RefuseHostWaits() {
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR);
  }
  ~RefuseHostWaits() {
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
  }
};

// A training step whose gradients are `inputs` times the loss scale.
struct Trainer {
  explicit Trainer(const OptimizerOptions& options)
      : parameters(make_parameters(at::kCUDA)),
        optimizer(ddp::make_optimizer(parameters, options)),
        scaler([] {
          ddp::AmpOptions amp;
          amp.grad_scaling = ddp::GradScaling::On;
          amp.init_scale = 1024.0;
          amp.growth_interval = 3;
          return amp;
        }()),
        ema(parameters, {.decay = 0.75}),
        lr(at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(at::kCUDA))),
        norm(at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(at::kCUDA))) {
    for (const auto& parameter : parameters) {
      inputs.push_back(at::zeros(parameter.tensor.sizes(), lr.options()));
    }
  }

  void load(int64_t step) {
    for (size_t k = 0; k < inputs.size(); ++k) {
      inputs[k].copy_(gradient_of(parameters[k], k, step));
    }
    if (step == 4 || step == 5) {
      inputs[1][7] = std::numeric_limits<float>::infinity();
    }
    lr.fill_(0.0625 / static_cast<double>(1 + step % 3));
  }

  // `rate` is the tensor in a captured step and the host's number in an eager one.
  void step(const ddp::StepScalar& rate) {
    optimizer->zero_grad();
    at::Tensor loss = at::zeros({}, lr.options());
    for (size_t k = 0; k < inputs.size(); ++k) {
      loss = loss + (parameters[k].tensor * inputs[k]).sum();
    }
    scaler.scale(loss).backward();
    scaler.unscale_(*optimizer);
    norm.copy_(ddp::clip_grad_norm_(parameters, 2.0));
    scaler.step(*optimizer, rate);
    scaler.update();
    ema.update();
  }

  NamedParameters parameters;
  std::unique_ptr<ddp::Optimizer> optimizer;
  ddp::GradScaler scaler;
  ddp::Ema ema;
  at::Tensor lr;
  at::Tensor norm;
  std::vector<at::Tensor> inputs;
};

void check_same(const Trainer& a, const Trainer& b) {
  for (size_t k = 0; k < a.parameters.size(); ++k) {
    INFO(a.parameters[k].name);
    CHECK(at::equal(a.parameters[k].tensor.detach(), b.parameters[k].tensor.detach()));
    CHECK(at::equal(a.ema.averages()[k].tensor, b.ema.averages()[k].tensor));
  }
  const ddp::StateDict state = a.optimizer->state_dict();
  for (const auto& [key, tensor] : b.optimizer->state_dict().tensors) {
    INFO(key);
    CHECK(at::equal(state.tensors.at(key), tensor));
  }
  CHECK(a.scaler.get_scale() == b.scaler.get_scale());
  const bool same_scaler = a.scaler.state_dict().values == b.scaler.state_dict().values;
  CHECK(same_scaler);
  CHECK(at::equal(at::nan_to_num(a.norm), at::nan_to_num(b.norm)));
}

}  // namespace

TEST_CASE("GPU steps equal CPU steps", "[gpu]") {
  for (const Rule& rule : rules()) {
    INFO(rule.name);
    NamedParameters cpu = make_parameters(at::kCPU);
    NamedParameters gpu = make_parameters(at::kCUDA);
    auto on_cpu = ddp::make_optimizer(cpu, rule.options);
    auto on_gpu = ddp::make_optimizer(gpu, rule.options);
    for (int64_t step = 0; step < 12; ++step) {
      set_device_gradients(cpu, step);
      set_device_gradients(gpu, step);
      const double norm = ddp::clip_grad_norm_(cpu, 3.0).item<double>();
      CHECK(ddp::clip_grad_norm_(gpu, 3.0).item<double>() == Approx(norm).epsilon(1e-5));
      on_cpu->step(0.0625);
      on_gpu->step(0.0625);
    }
    // The norms differ in the last bits, and so do clipped gradients. float32 state agrees to a few
    // ulp. A bfloat16 leaf agrees to one ulp, if rounding goes the other way.
    const ddp::StateDict state = on_gpu->state_dict();
    for (const auto& [key, tensor] : on_cpu->state_dict().tensors) {
      INFO(key);
      CHECK(ulps(state.tensors.at(key), tensor) <= 32.0);
    }
    CHECK(ulps(gpu[0].tensor, cpu[0].tensor) <= 32.0);
    CHECK(ulps(gpu[2].tensor.to(at::kFloat), cpu[2].tensor.to(at::kFloat)) <= 65536.0);
  }
}

TEST_CASE("GPU steps of float64 weights take the learning rate in float64", "[gpu]") {
  auto all = rules();
  for (const auto type : {OptimizerType::Lars, OptimizerType::Lamb}) {
    OptimizerOptions options;
    options.type = type;
    options.momentum = 0.9;
    options.trust_coefficient = 0.125;
    options.weight_decay = 0.01;
    options.groups = {{.patterns = {"bias"}, .lr_scale = 0.3}};
    all.push_back({type == OptimizerType::Lars ? "lars" : "lamb", options});
  }
  for (const Rule& rule : all) {
    INFO(rule.name);
    const auto double_parameters = [](at::Device device) {
      const auto leaf = [&](at::IntArrayRef shape, int64_t k) {
        return weights(shape, k).detach().to(device, at::kDouble).requires_grad_();
      };
      return NamedParameters{{"matrix", leaf({7, 13}, 0)}, {"bias", leaf({33}, 1)}};
    };
    NamedParameters cpu = double_parameters(at::kCPU);
    NamedParameters gpu = double_parameters(at::kCUDA);
    auto on_cpu = ddp::make_optimizer(cpu, rule.options);
    auto on_gpu = ddp::make_optimizer(gpu, rule.options);
    for (int64_t step = 0; step < 12; ++step) {
      for (size_t k = 0; k < cpu.size(); ++k) {
        const auto value = gradient(cpu[k].tensor.sizes(), static_cast<int64_t>(k), step);
        cpu[k].tensor.mutable_grad() = value.to(at::kDouble);
        gpu[k].tensor.mutable_grad() = value.to(at::kCUDA, at::kDouble);
      }
      const double lr = 0.1 / static_cast<double>(1 + step);  // float32 has no such number
      on_cpu->step(lr);
      on_gpu->step(lr);
    }
    for (size_t k = 0; k < cpu.size(); ++k) {
      const auto difference = (gpu[k].tensor.cpu() - cpu[k].tensor).abs().max().item<double>();
      CHECK(difference <= 1e-12);
    }
  }
}

TEST_CASE("A wrapped optimizer waits for the scalars that the GPU still computes", "[gpu]") {
  const auto late = [](double value) {
    at::cuda::sleep(100'000'000);  // cycles
    return torch::full({}, value, torch::kCUDA);
  };
  const auto weight = torch::ones({4}, torch::kCUDA).requires_grad_();
  weight.mutable_grad() = torch::ones_like(weight);
  const auto optimizer = ddp::wrap_optimizer(
      std::make_shared<torch::optim::SGD>(std::vector{weight}, torch::optim::SGDOptions(1)),
      {{"weight", weight}});
  double expected = 1;
  for (const double lr : {0.25, 0.5, 0.125}) {
    CAPTURE(lr);
    optimizer->step({.lr = late(lr)});
    CHECK(weight.equal(torch::full_like(weight, expected -= lr)));
    optimizer->step({.lr = lr, .found_inf = late(1)});
    CHECK(weight.equal(torch::full_like(weight, expected)));
    optimizer->step({.lr = lr, .found_inf = late(0)});
    CHECK(weight.equal(torch::full_like(weight, expected -= lr)));
  }
}

TEST_CASE("Muon on a GPU moves weights as on the CPU", "[gpu]") {
  NamedParameters cpu = make_parameters(at::kCPU);
  NamedParameters gpu = make_parameters(at::kCUDA);
  const NamedParameters first = make_parameters(at::kCPU);
  auto on_cpu = ddp::make_optimizer(cpu, muon());
  auto on_gpu = ddp::make_optimizer(gpu, muon());
  for (int64_t step = 0; step < 12; ++step) {
    set_device_gradients(cpu, step);
    set_device_gradients(gpu, step);
    on_cpu->step(0.0625);
    on_gpu->step(0.0625);
  }
  for (size_t k = 0; k < cpu.size(); ++k) {
    INFO(cpu[k].name);
    const auto distance = [&](const at::Tensor& to) {
      return (gpu[k].tensor.detach().cpu() - to.detach()).to(at::kDouble).norm().item<double>();
    };
    // One singular value of conv's gradients is nearly 0: the direction is rounding noise of
    // bfloat16. On the CPU, gradients that differ by 1e-3 move the weights apart by 6 %.
    CHECK(distance(cpu[k].tensor) < 0.15 * distance(first[k].tensor));
  }
}

TEST_CASE("An eager GPU step never makes the host wait", "[gpu]") {
  for (const Rule& rule : rules_and_muon()) {
    if (rule.options.dampening != 0.0) {
      continue;  // reads found_inf until its first step, as documented
    }
    INFO(rule.name);
    Trainer trainer(rule.options);
    trainer.load(0);
    trainer.step(0.0625);
    at::cuda::getCurrentCUDAStream().synchronize();
    const RefuseHostWaits guard;
    CHECK_NOTHROW(trainer.step(0.03125));
    CHECK_NOTHROW(trainer.step(trainer.lr));
  }
}

TEST_CASE("A captured step replays an eager step's bits", "[gpu]") {
  for (const Rule& rule : rules_and_muon()) {
    INFO(rule.name);
    // AccumulateGrad runs on the stream of its creation, so leaves, warm-up and capture use one
    // stream.
    const c10::cuda::CUDAStreamGuard on_stream(c10::cuda::getStreamFromPool());
    Trainer eager(rule.options);
    Trainer captured(rule.options);
    captured.load(0);
    captured.step(captured.lr);  // creates state and scale
    at::cuda::CUDAGraph graph;
    graph.capture_begin();
    captured.step(captured.lr);
    graph.capture_end();
    for (int64_t step = 0; step < 12; ++step) {
      eager.load(step);
      eager.step(0.0625 / static_cast<double>(1 + step % 3));
      if (step > 0) {
        captured.load(step);
        graph.replay();
      }
      INFO("step " << step);
      check_same(captured, eager);
    }
    CHECK(eager.scaler.get_scale() < 1024.0 * 8);  // steps 4 and 5 had infs
  }
}

TEST_CASE("State is not made inside a capture", "[gpu]") {
  const c10::cuda::CUDAStreamGuard on_stream(c10::cuda::getStreamFromPool());
  for (const OptimizerOptions& options : {rules().back().options, muon()}) {
    NamedParameters parameters = make_parameters(at::kCUDA);
    auto optimizer = ddp::make_optimizer(parameters, options);
    set_device_gradients(parameters, 0);
    at::cuda::getCurrentCUDAStream().synchronize();
    at::cuda::CUDAGraph graph;
    graph.capture_begin();
    const std::string message = message_of<ddp::SettingsError>([&] { optimizer->step(0.1); });
    at::zeros({1}, at::TensorOptions().device(at::kCUDA));  // gives the graph a node
    graph.capture_end();
    CHECK(contains(message, "run one step eagerly before capturing"));
  }
}
