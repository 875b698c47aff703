// SPDX-License-Identifier: Apache-2.0
// Tensors that captured steps read and that models derive from others: rotary tables, FP8 copies.
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/ops/language.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "ddp/train/graphed_step.hpp"
#include "models/lora.hpp"
#include "models/qwen2.hpp"
#include "support/catch.hpp"
#include "support/multi_rank_main.hpp"

using namespace ddp;

namespace {

using Inputs = std::vector<torch::Tensor>;
using Step = GraphedStep<Inputs, Inputs>;

/// A step without parts that captures `forward`, an evaluation to one number.
Step make_step(const std::function<torch::Tensor(const Inputs&)>& forward,
               GraphedParts parts = {}) {
  return Step(
      test::context(), std::move(parts),
      [forward](const Inputs& batch, const StepScalars&) { return Inputs{forward(batch)}; },
      GraphedStepOptions{.mode = CudaGraph::On});
}

double run(Step& step, const Inputs& batch) {
  const torch::NoGradGuard no_grad;  // else a model with gradients would first train
  return step(batch, {}).log[0].value();
}

/// Runs until replays have begun, and returns a replay's number.
double warm_up(Step& step, const Inputs& batch) {
  for (int i = 0; i < 20; ++i) {
    run(step, batch);
  }
  REQUIRE(step.counts().replayed > 1);
  return run(step, batch);
}

torch::TensorOptions in_bf16() {
  return torch::TensorOptions().device(test::context().device()).dtype(torch::kBFloat16);
}

struct Net : torch::nn::Module {
  Net() {
    layer = register_module("layer", models::Linear(256, 256, false, in_bf16()));
    const torch::NoGradGuard no_grad;
    layer->weight.normal_(0, 0.05);
    models::add_lora(*this, {.rank = 8,
                             .dropout = 0,
                             .target_modules = {"layer"},
                             .dtype = torch::kBFloat16,
                             .fp8_base = true});
    layer->lora_b.normal_(0, 0.05);
  }
  torch::Tensor forward(const torch::Tensor& x) { return layer->forward(x); }
  models::Linear layer{nullptr};
};

bool near(double a, double b) {
  return std::abs(a - b) <= 1e-3 * std::abs(b);
}

}  // namespace

TEST_CASE("a captured step keeps its rotary tables when a longer sequence comes") {
  models::Qwen2Options o;
  o.vocab_size = 512;
  o.hidden_size = 128;
  o.intermediate_size = 256;
  o.num_layers = 2;
  o.num_heads = 4;
  o.num_kv_heads = 2;
  o.head_dim = 64;
  o.max_positions = 8192;
  models::Qwen2 net(o, in_bf16());
  net->reset_parameters();
  const auto loss = [&](const Inputs& batch) {
    return net->forward({.input_ids = batch[0]}, batch[1]).loss_sum;
  };
  const auto batch = [&](int64_t length) {
    const auto ids = torch::randint(512, {2, length + 1}, torch::kLong).cuda();
    return Inputs{ids.narrow(1, 0, length).contiguous(), ids.narrow(1, 1, length).contiguous()};
  };
  auto step = make_step(loss);
  const auto eager = [&](const Inputs& inputs) {
    const torch::NoGradGuard no_grad;
    return loss(inputs).item<double>();
  };
  const auto shorter = batch(128);
  const double before = warm_up(step, shorter);
  REQUIRE(near(before, eager(shorter)));
  // 1,024, 2,048 and 4,096 positions. Then freed memory would be overwritten.
  for (const int64_t length : {2048, 4096}) {
    eager(batch(length));
    std::vector<torch::Tensor> others;
    for (int i = 0; i < 64; ++i) {
      others.push_back(torch::full({1024, 32}, 1e3, torch::kCUDA));
      others.push_back(torch::full({2048, 32}, 1e3, torch::kCUDA));
    }
    torch::cuda::synchronize();
    CHECK(run(step, shorter) == before);
  }
}

TEST_CASE("a captured step multiplies with the FP8 copies of changed weights") {
  if (!ops::multiplies_fp8(test::context().device())) {
    WARN("skipped: the GPU does not multiply FP8");
    return;
  }
  const auto net = std::make_shared<Net>();
  DistributedDataParallel<std::shared_ptr<Net>> model(net, test::context().communicator());
  const auto forward = [&](const Inputs& batch) {
    return net->forward(batch[0]).to(torch::kFloat).square().mean();
  };
  const Inputs batch{torch::randn({64, 256}).to(in_bf16())};
  auto step = make_step(forward);
  auto with_parts = make_step(forward, {.models = {&model}});
  warm_up(step, batch);
  double last = warm_up(with_parts, batch);
  const torch::NoGradGuard no_grad;
  auto& weight = net->layer->weight;
  const std::vector<std::pair<std::string, std::function<void()>>> changes = {
      {"mul_", [&] { weight.mul_(2); }},
      {"copy_", [&] { weight.copy_(torch::randn_like(weight) * 0.1); }},
      {"load_state_dict",
       [&] {
         auto state = model.state_dict();
         for (auto& [name, tensor] : state.tensors) {
           tensor = tensor * 3;
         }
         model.load_state_dict(state);
       }},
      {"data()",
       [&] {
         weight.data().mul_(2);
         models::refresh_fp8_base();
       }},
      {"a merge, and a new adapter",
       [&] {
         models::merge_lora(*net);
         weight.mul_(2);
         net->layer->add_lora({.rank = 8,
                               .dropout = 0,
                               .target_modules = {"layer"},
                               .dtype = torch::kBFloat16,
                               .fp8_base = true});
       }},
      {"a merge", [&] {
         net->layer->lora_b.normal_(0, 0.05);
         models::merge_lora(*net);
       }}};
  for (const auto& [name, change] : changes) {
    CAPTURE(name);
    change();
    const double graphed = run(step, batch), other = run(with_parts, batch);
    const double eager = forward(batch).item<double>();
    CHECK(near(graphed, eager));
    CHECK(near(other, eager));
    CHECK_FALSE(eager == last);
    last = eager;
  }
}
