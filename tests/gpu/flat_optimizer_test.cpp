// SPDX-License-Identifier: Apache-2.0
// The flat optimizer on one GPU equals PyTorch's optimizers, the lists of ATen's kernels and the
// host's loop. A captured step gives the same bits.
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/torch.h>

#include "ddp/optim/ema.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "support/catch.hpp"
#include "unit/optim/optim_test_support.hpp"
#include "unit/optim/optimizer_golden.hpp"

using namespace optim_test;
using ddp::NamedParameters;
using ddp::OptimizerImplementation;
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
  sgd.decay_norm_and_bias = false;
  OptimizerOptions momentum = sgd;
  momentum.momentum = 0.9;
  OptimizerOptions nesterov = momentum;
  nesterov.nesterov = true;
  nesterov.groups = {{.patterns = {"*.bias"}, .lr_scale = 0.5, .weight_decay = 0.25}};
  OptimizerOptions adam = sgd;
  adam.type = OptimizerType::Adam;
  // If the decay cancels a gradient, the rest is a rounding error, which a small eps would turn
  // into an update.
  adam.eps = 1e-5;
  OptimizerOptions adamw = adam;
  adamw.type = OptimizerType::AdamW;
  OptimizerOptions amsgrad = adamw;
  amsgrad.amsgrad = true;
  OptimizerOptions lars = momentum;
  lars.type = OptimizerType::Lars;
  lars.trust_coefficient = 0.125;
  OptimizerOptions lamb = adam;
  lamb.type = OptimizerType::Lamb;
  return {{"sgd", sgd},     {"momentum", momentum}, {"nesterov", nesterov}, {"adam", adam},
          {"adamw", adamw}, {"amsgrad", amsgrad},   {"lars", lars},         {"lamb", lamb}};
}

// Sizes around a chunk's, a vector's and one element; every leaf dtype; a leaf that does not begin
// on a vector boundary.
NamedParameters make_parameters(at::Device device) {
  const auto leaf = [&](at::IntArrayRef shape, int64_t k, at::ScalarType dtype) {
    return weights(shape, k).detach().to(device, dtype).requires_grad_();
  };
  const at::Tensor storage = weights({5000}, 7).detach().to(device);
  return {{"conv.weight", leaf({8, 4, 3, 3}, 0, at::kFloat)
                              .detach()
                              .contiguous(at::MemoryFormat::ChannelsLast)
                              .requires_grad_()},
          {"large.weight", leaf({331, 131}, 1, at::kBFloat16)},
          {"large.bias", leaf({4099}, 2, at::kFloat)},
          {"chunk.weight", leaf({64, 64}, 3, at::kHalf)},
          {"one.bias", leaf({1}, 4, at::kFloat)},
          {"odd.weight", storage.narrow(0, 3, 4101).detach().requires_grad_()},
          {"short.bias", leaf({6}, 5, at::kBFloat16)}};
}

// Gradients like a reducer's: in place, in the same memory in every step.
struct Gradients {
  explicit Gradients(const NamedParameters& parameters) {
    for (size_t k = 0; k < parameters.size(); ++k) {
      const at::Tensor& leaf = parameters[k].tensor;
      // Half-precision leaves get gradients of either dtype.
      const auto dtype = k % 2 == 1 ? leaf.scalar_type() : at::kFloat;
      memory.push_back(at::zeros_like(leaf.detach(), leaf.options().dtype(dtype)));
    }
  }
  void load(int64_t step) {
    for (size_t k = 0; k < memory.size(); ++k) {
      memory[k].copy_(gradient(memory[k].sizes(), static_cast<int64_t>(k), step));
    }
  }
  std::vector<at::Tensor> memory;
};

struct Trainer {
  Trainer(at::Device device, const OptimizerOptions& options)
      : parameters(make_parameters(device)),
        gradients(parameters),
        optimizer(ddp::make_optimizer(parameters, options)) {}

  void step(int64_t index, const ddp::StepScalars& scalars) {
    gradients.load(index);
    attach();
    optimizer->step(scalars);
  }
  void attach() const {
    for (size_t k = 0; k < parameters.size(); ++k) {
      parameters[k].tensor.mutable_grad() = gradients.memory[k];
    }
  }

  NamedParameters parameters;
  Gradients gradients;
  std::unique_ptr<ddp::Optimizer> optimizer;
};

void check_close(const Trainer& a, const Trainer& b, double tolerance) {
  const ddp::StateDict state = a.optimizer->state_dict();
  for (const auto& [key, tensor] : b.optimizer->state_dict().tensors) {
    INFO(key);
    CHECK(ulps(state.tensors.at(key), tensor) <= tolerance);
  }
  for (size_t k = 0; k < a.parameters.size(); ++k) {
    const at::Tensor& leaf = a.parameters[k].tensor;
    INFO(a.parameters[k].name);
    // Half-precision leaves may differ by one unit of their own, if rounding goes the other way.
    const double spacing = leaf.scalar_type() == at::kBFloat16 ? 65536.0
                           : leaf.scalar_type() == at::kHalf   ? 8192.0
                                                               : tolerance;
    CHECK(ulps(leaf.to(at::kFloat), b.parameters[k].tensor.to(at::kFloat)) <= spacing);
  }
}

void check_same(const Trainer& a, const Trainer& b) {
  const ddp::StateDict state = a.optimizer->state_dict();
  for (const auto& [key, tensor] : b.optimizer->state_dict().tensors) {
    INFO(key);
    CHECK(at::equal(state.tensors.at(key), tensor));
  }
  for (size_t k = 0; k < a.parameters.size(); ++k) {
    INFO(a.parameters[k].name);
    CHECK(at::equal(a.parameters[k].tensor.detach(), b.parameters[k].tensor.detach()));
  }
}

}  // namespace

TEST_CASE("GPU steps, flat and over lists, take torch.optim's 100 steps", "[gpu]") {
  const nlohmann::json golden = read_golden("optimizer_golden.json");
  REQUIRE(golden["cases"].size() == 9);
  for (const auto& [name, golden_case] : golden["cases"].items()) {
    for (const auto implementation :
         {OptimizerImplementation::List, OptimizerImplementation::Flat}) {
      const bool is_flat = implementation == OptimizerImplementation::Flat;
      if (is_flat && !can_be_flat(golden_case)) {
        continue;
      }
      INFO(name << (is_flat ? ", flat" : ", list"));
      check_golden_case(name, golden_case, {.implementation = implementation, .device = at::kCUDA});
      check_golden_case(name, golden_case,
                        {.implementation = implementation,
                         .channels_last = true,
                         .lr_on_device = true,
                         .device = at::kCUDA});
    }
  }
}

// Fused multiply-adds round in other places than the host and ATen: a few ulp after 100 steps.
TEST_CASE("100 flat GPU steps equal ATen's lists on the GPU and the host's loop", "[gpu]") {
  for (const Rule& rule : rules()) {
    INFO(rule.name);
    Trainer flat(at::kCUDA, as(rule.options, OptimizerImplementation::Flat));
    Trainer list(at::kCUDA, as(rule.options, OptimizerImplementation::List));
    Trainer host(at::kCPU, as(rule.options, OptimizerImplementation::Flat));
    for (int64_t step = 0; step < 100; ++step) {
      const ddp::StepScalars scalars{
          .lr = 0.0078125, .inverse_scale = 0.5, .clip_factor = step % 2 == 0 ? 1.0 : 0.75};
      flat.step(step, scalars);
      list.step(step, scalars);
      host.step(step, scalars);
    }
    check_close(flat, list, 32.0);
    check_close(flat, host, 32.0);
  }
}

TEST_CASE("A captured flat step replays an eager step's bits", "[gpu]") {
  const c10::cuda::CUDAStreamGuard on_stream(c10::cuda::getStreamFromPool());
  const auto options = at::TensorOptions().dtype(at::kFloat).device(at::kCUDA);
  for (const Rule& rule : rules()) {
    INFO(rule.name);
    Trainer eager(at::kCUDA, as(rule.options, OptimizerImplementation::Flat));
    Trainer captured(at::kCUDA, as(rule.options, OptimizerImplementation::Flat));
    const at::Tensor lr = at::full({}, 0.0625F, options);
    const at::Tensor inverse_scale = at::full({}, 0.25F, options);
    const at::Tensor clip = at::full({}, 1.0F, options);
    const at::Tensor found_inf = at::zeros({}, options);
    const ddp::StepScalars scalars{
        .lr = lr, .inverse_scale = inverse_scale, .found_inf = found_inf, .clip_factor = clip};
    captured.step(0, scalars);  // creates the state
    at::cuda::CUDAGraph graph;
    graph.capture_begin();
    captured.optimizer->step(scalars);
    graph.capture_end();
    for (int64_t step = 0; step < 50; ++step) {
      const double rate = 0.0625 / static_cast<double>(1 + step % 3);
      const bool skipped = step % 7 == 4;
      const double factor = step % 5 == 0 ? 0.3 : 1.0;
      eager.step(step, {.lr = rate,
                        .inverse_scale = 0.25,
                        .found_inf = skipped ? 1.0 : 0.0,
                        .clip_factor = factor});
      if (step > 0) {
        lr.fill_(rate);
        clip.fill_(factor);
        found_inf.fill_(skipped ? 1.0 : 0.0);
        captured.gradients.load(step);
        graph.replay();
      } else {
        // The eager first step of `captured` had no clipping, so both continue from equal state.
        captured.optimizer->load_state_dict(eager.optimizer->state_dict());
        for (size_t k = 0; k < eager.parameters.size(); ++k) {
          captured.parameters[k].tensor.detach().copy_(eager.parameters[k].tensor.detach());
        }
      }
    }
    check_same(captured, eager);
  }
}

TEST_CASE("Parameters without a gradient keep their bits on the GPU", "[gpu]") {
  for (const Rule& rule : rules()) {
    INFO(rule.name);
    Trainer flat(at::kCUDA, as(rule.options, OptimizerImplementation::Flat));
    flat.step(0, {.lr = 0.0625});
    flat.gradients.load(1);
    flat.attach();
    flat.parameters[1].tensor.mutable_grad().reset();
    const at::Tensor before = flat.parameters[1].tensor.detach().clone();
    const at::Tensor moved = flat.parameters[2].tensor.detach().clone();
    flat.optimizer->step(0.0625);
    CHECK(at::equal(flat.parameters[1].tensor.detach(), before));
    CHECK_FALSE(at::equal(flat.parameters[2].tensor.detach(), moved));
    if (rule.options.type != OptimizerType::Sgd && rule.options.type != OptimizerType::Lars) {
      const auto state = flat.optimizer->state_dict();
      CHECK(state.tensors.at("state.large.weight.step").item<float>() == 1.0F);
      CHECK(state.tensors.at("state.large.bias.step").item<float>() == 2.0F);
    }
  }
}

// Sums run in another order than on the host.
TEST_CASE("A GPU scan finds what the host's does, and the same bits each time", "[gpu]") {
  const auto flat = as(rules().front().options, OptimizerImplementation::Flat);
  const c10::cuda::CUDAStreamGuard on_stream(c10::cuda::getStreamFromPool());
  Trainer gpu(at::kCUDA, flat);
  Trainer host(at::kCPU, flat);
  for (int64_t step = 0; step < 3; ++step) {
    gpu.gradients.load(step);
    host.gradients.load(step);
    if (step > 0) {
      gpu.gradients.memory[3][63][63] = std::nan("");
      host.gradients.memory[3][63][63] = std::nan("");
    }
    gpu.attach();
    host.attach();
    const auto found = gpu.optimizer->scan_gradients(0.5, 2.0);
    const auto again = gpu.optimizer->scan_gradients(0.5, 2.0);
    const auto expected = host.optimizer->scan_gradients(0.5, 2.0);
    CHECK(at::equal(at::nan_to_num(found.norm, 7.0), at::nan_to_num(again.norm, 7.0)));
    CHECK(at::allclose(found.norm.cpu(), expected.norm, 1e-6, 0.0, /*equal_nan=*/true));
    CHECK(at::allclose(found.clip_factor.cpu(), expected.clip_factor, 1e-6, 0.0, true));
    CHECK(found.found_inf.item<float>() == (step > 0 ? 1.0F : 0.0F));
    CHECK(found.first_non_finite.item<int>() == (step > 0 ? 3 : -1));
  }
  CHECK(gpu.optimizer->non_finite_report().num_scans == 4);
  CHECK(gpu.optimizer->non_finite_report().parameter == "chunk.weight");
  // The same in a capture, on other gradients.
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  const auto captured = gpu.optimizer->scan_gradients(0.5, 2.0);
  graph.capture_end();
  gpu.gradients.load(5);
  graph.replay();
  const auto eager = gpu.optimizer->scan_gradients(0.5, 2.0);
  CHECK(at::equal(captured.norm, eager.norm));
  CHECK(at::equal(captured.clip_factor, eager.clip_factor));
  CHECK(captured.first_non_finite.item<int>() == -1);
}

TEST_CASE("Gradients whose squares float32 does not hold are measured on the GPU", "[gpu]") {
  const auto implementation =
      GENERATE(OptimizerImplementation::List, OptimizerImplementation::Flat);
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16);
  OptimizerOptions options;
  options.implementation = implementation;
  NamedParameters parameters = {
      {"w",
       at::zeros({70, 70}, at::TensorOptions().device(at::kCUDA).dtype(dtype)).requires_grad_()}};
  auto optimizer = ddp::make_optimizer(parameters, options);
  at::Tensor& grad = parameters[0].tensor.mutable_grad();
  grad = at::zeros_like(parameters[0].tensor);
  grad[0][0] = std::ldexp(3.0, 90);
  grad[69][69] = std::ldexp(-4.0, 90);
  const auto scan = optimizer->scan_gradients(std::ldexp(1.0, -10), 2.0);
  CHECK(scan.found_inf.item<float>() == 0.0F);
  CHECK(scan.norm.item<double>() == Approx(std::ldexp(5.0, 80)).epsilon(1e-6));
  CHECK(scan.clip_factor.item<double>() == Approx(std::ldexp(0.4, -80)).epsilon(1e-6));
  CHECK(ddp::clip_grad_norm_(parameters, 1.0).item<double>() ==
        Approx(std::ldexp(5.0, 90)).epsilon(1e-6));
  CHECK(grad[0][0].item<double>() == Approx(0.6).epsilon(0.01));
}

// One more or one less rounding of the product: 2 ulp after 20 updates.
TEST_CASE("Averages by one kernel equal ATen's", "[gpu]") {
  const double decay = GENERATE(0.25, 0.75, 0.999);
  NamedParameters gpu = make_parameters(at::kCUDA);
  NamedParameters cpu = make_parameters(at::kCPU);
  for (NamedParameters* list : {&gpu, &cpu}) {
    const at::Device device = list->front().tensor.device();
    list->push_back(
        {"counter", at::zeros({}, at::TensorOptions().dtype(at::kLong).device(device))});
  }
  ddp::Ema on_gpu(gpu, {.decay = decay});
  ddp::Ema on_cpu(cpu, {.decay = decay});
  for (int64_t step = 0; step < 20; ++step) {
    for (NamedParameters* list : {&gpu, &cpu}) {
      for (size_t k = 0; k < list->size(); ++k) {
        at::Tensor tensor = (*list)[k].tensor.detach();
        tensor.copy_(gradient(tensor.sizes(), static_cast<int64_t>(k), step));
      }
    }
    on_gpu.update();
    on_cpu.update();
  }
  for (size_t k = 0; k < gpu.size(); ++k) {
    INFO(gpu[k].name);
    CHECK(ulps(on_gpu.averages()[k].tensor, on_cpu.averages()[k].tensor) <= 2.0);
  }
}

TEST_CASE("A parameter moved to the GPU after its optimizer was made is told", "[gpu]") {
  OptimizerOptions options;
  options.implementation = OptimizerImplementation::Flat;
  NamedParameters parameters = {{"w", weights({40}, 0)}};
  auto optimizer = ddp::make_optimizer(parameters, options);
  parameters[0].tensor.set_data(parameters[0].tensor.detach().cuda());
  parameters[0].tensor.mutable_grad() = at::ones({40}, at::kCUDA);
  CHECK(contains(message_of<ddp::SettingsError>([&] { optimizer->step(0.1); }),
                 "parameter w was replaced after the optimizer was made"));
}

TEST_CASE("A weight loaded while its module was elsewhere is what the next step begins with",
          "[gpu]") {
  for (const auto implementation : {OptimizerImplementation::List, OptimizerImplementation::Flat}) {
    OptimizerOptions options;
    options.implementation = implementation;
    NamedParameters parameters = {
        {"w", weights({40}, 0).detach().to(at::kCUDA, at::kBFloat16).requires_grad_()}};
    auto& leaf = parameters[0].tensor;
    auto optimizer = ddp::make_optimizer(parameters, options);
    const auto step = [&](double lr) {
      leaf.mutable_grad() = at::ones_like(leaf);
      optimizer->step(lr);
    };
    step(0.1);
    leaf.mutable_grad() = at::Tensor();
    leaf.set_data(leaf.detach().cpu());
    {
      const at::NoGradGuard no_grad;
      leaf.fill_(3.0);
    }
    leaf.set_data(leaf.detach().cuda());
    step(0.0);
    CHECK(at::equal(leaf.detach(), at::full_like(leaf, 3.0)));
  }
}

// Padding after the last of 4k + 3 elements has zero mean and square: 0 / 0 without eps.
TEST_CASE("LAMB without eps has the host's trust ratio at any size", "[gpu]") {
  OptimizerOptions options;
  options.type = OptimizerType::Lamb;
  options.eps = 0.0;
  options.implementation = OptimizerImplementation::Flat;
  NamedParameters gpu = {{"w", weights({3, 65}, 0).detach().cuda().requires_grad_()}};
  NamedParameters cpu = {{"w", weights({3, 65}, 0)}};
  auto on_gpu = ddp::make_optimizer(gpu, options);
  auto on_cpu = ddp::make_optimizer(cpu, options);
  for (int64_t step = 0; step < 5; ++step) {
    cpu[0].tensor.mutable_grad() = gradient({3, 65}, 0, step).abs() + 0.5;
    gpu[0].tensor.mutable_grad() = cpu[0].tensor.grad().cuda();
    on_gpu->step(0.0078125);
    on_cpu->step(0.0078125);
  }
  CHECK(ulps(gpu[0].tensor, cpu[0].tensor) <= 8.0);
}

TEST_CASE("Trust ratios whose squares float32 does not hold are the host's", "[gpu]") {
  const auto implementation =
      GENERATE(OptimizerImplementation::List, OptimizerImplementation::Flat);
  const auto type = GENERATE(OptimizerType::Lars, OptimizerType::Lamb);
  OptimizerOptions options;
  options.type = type;
  options.weight_decay = 0.5;
  options.trust_coefficient = 0.25;
  options.implementation = implementation;
  const at::Tensor start = weights({70, 70}, 0).detach() * 1e20;
  NamedParameters gpu = {{"w", start.cuda().requires_grad_()}};
  NamedParameters cpu = {{"w", start.clone().requires_grad_()}};
  auto on_gpu = ddp::make_optimizer(gpu, options);
  auto on_cpu = ddp::make_optimizer(cpu, options);
  for (int64_t step = 0; step < 3; ++step) {
    cpu[0].tensor.mutable_grad() =
        gradient({70, 70}, 0, step) * (type == OptimizerType::Lars ? 1e20 : 1.0);
    gpu[0].tensor.mutable_grad() = cpu[0].tensor.grad().cuda();
    on_gpu->step(0.0078125);
    on_cpu->step(0.0078125);
  }
  CHECK_FALSE(at::equal(gpu[0].tensor.detach().cpu(), start));
  CHECK(ulps(gpu[0].tensor.detach() / 1e20, cpu[0].tensor.detach() / 1e20) <= 8.0);
}

TEST_CASE("the state is not cut from memory that a backward left in the cache") {
  constexpr int64_t kNumel = int64_t{16} << 20;  // 64 MiB in float32
  const auto device = at::Device(at::kCUDA, 0);
  const auto parameter = torch::zeros({kNumel}, device).requires_grad_();
  parameter.mutable_grad() = torch::ones_like(parameter);
  OptimizerOptions options;
  options.type = OptimizerType::AdamW;
  const auto optimizer = ddp::make_optimizer({{"weight", parameter}}, options);
  c10::cuda::CUDACachingAllocator::emptyCache();
  { const auto activations = torch::empty({8 * kNumel}, device); }
  optimizer->step(1e-3);
  c10::cuda::CUDACachingAllocator::emptyCache();
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  const auto unused = stats.reserved_bytes[kAll].current - stats.allocated_bytes[kAll].current;
  CHECK(unused < int64_t{100} << 20);
}
