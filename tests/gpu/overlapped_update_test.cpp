// SPDX-License-Identifier: Apache-2.0
// Updates during backward beside ops that run on streams of their own: a bucket's weights change
// only when nobody reads them any more.
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAGuard.h>

#include "ddp/ops/cross_entropy.hpp"
#include "ddp/ops/side_task.hpp"
#include "ddp/ops/wgrad_branch.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "models/memory_format.hpp"
#include "models/precision.hpp"
#include "models/resnet.hpp"
#include "ops/grad_target.hpp"
#include "ops/wgrad_stream.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

constexpr double kLr = 0.0625;
constexpr int64_t kLongWait = 50'000'000;  // clock ticks, some 30 ms

OptimizerOptions rule(bool overlap_backward) {
  OptimizerOptions options;
  options.momentum = 0.9;
  options.nesterov = true;
  options.weight_decay = 0.01;
  options.implementation = OptimizerImplementation::Flat;
  options.overlap_backward = overlap_backward;
  return options;
}

// x * weight, whose weight gradient takes the branch while the product with the weight, for the
// input's gradient, comes late.
struct LateProduct : torch::autograd::Function<LateProduct> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& weight, bool late) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["limit"] = ops::WgradBranch::current_limit();
    ctx->saved_data["late"] = late;
    return x * weight;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const ops::detail::WeightGradient gradient(saved[1], ctx->saved_data["limit"].toInt());
    const auto grad_weight = gradient.make({saved[0], grads[0]}, [&] {
      const auto target = ops::detail::grad_target(saved[1]);
      target.write((grads[0] * saved[0]).sum(0));
      return target.result();
    });
    if (ctx->saved_data["late"].toBool()) {
      at::cuda::sleep(kLongWait);
    }
    return {grads[0] * saved[1].detach(), grad_weight, at::Tensor()};
  }
};

struct TwoBranchesImpl : torch::nn::Module {
  TwoBranchesImpl() {
    stem = register_parameter("stem", integers({8}, 1).cpu());
    shortcut = register_parameter("shortcut", integers({8}, 2).cpu());
    to(context().device());
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = LateProduct::apply(x, stem, false);
    ops::SideTask task(
        y, [&](const at::Tensor& in) { return LateProduct::apply(in, shortcut, late); }, beside);
    const auto main = y * 2;
    return main + task.wait();
  }
  at::Tensor stem, shortcut;
  bool beside = false, late = false;
};
TORCH_MODULE(TwoBranches);

}  // namespace

TEST_CASE("a weight that a side stream still reads is updated after that") {
  TwoBranches plain;
  TwoBranches overlapped;
  overlapped->beside = overlapped->late = true;
  DistributedDataParallel reference(plain, group(), with_cap(1e-6));
  DistributedDataParallel model(overlapped, group(), with_cap(1e-6));
  auto expected = make_optimizer(reference, rule(false));
  auto optimizer = make_optimizer(model, rule(true));
  for (int step = 0; step < 4; ++step) {
    CAPTURE(step);
    const auto x = integers({3, 8}, 10 + step);
    reference.zero_grad();
    model.zero_grad();
    reference.forward(x).sum().backward();
    expected.step(kLr);
    {
      const ops::WgradBranch branch(true);
      auto loss = model.forward(x).sum();
      optimizer.begin_step({.lr = kLr});
      loss.backward();
      optimizer.step(kLr);
    }
    require_equal(grads_of(*overlapped), grads_of(*plain));
    for (const auto& name : {"stem", "shortcut"}) {
      INFO(name);
      CHECK(torch::equal(overlapped->named_parameters()[name].detach(),
                         plain->named_parameters()[name].detach()));
    }
  }
}

TEST_CASE("a ResNet on side streams, updated during backward, trains the plain run's weights") {
  const auto images = torch::randn({64, 3, 32, 32}, on_device())
                          .to(torch::kBFloat16)
                          .contiguous(at::MemoryFormat::ChannelsLast);
  const auto labels = torch::randint(10, {64}, on_device().dtype(torch::kLong));
  std::vector<torch::Tensor> plain;
  for (const bool beside : {false, true}) {
    torch::manual_seed(8);
    auto module = models::resnet18({.num_classes = 10, .side_streams = beside});
    module->to(context().device());
    models::to_half_but_norms(*module, torch::kBFloat16);
    models::to_channels_last(*module);
    DistributedDataParallel model(module, group(), with_cap(beside ? 0.25 : 25));
    auto optimizer = make_optimizer(model, rule(beside));
    for (int step = 0; step < 20; ++step) {
      model.zero_grad();
      auto loss = ops::cross_entropy(model.forward(images), labels).loss;
      optimizer.begin_step({.lr = kLr});
      loss.backward();
      optimizer.step(kLr);
    }
    const auto parameters = module->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      INFO("parameter " << i);
      if (beside) {
        CHECK(torch::equal(parameters[i].detach(), plain[i]));
      } else {
        plain.push_back(parameters[i].detach().clone());
      }
    }
  }
}

// The update of 16 M weights takes longer than the forward up to where it reads them.
TEST_CASE("a forward after a begun step that was never ended waits for its updates") {
  constexpr double kTiny = 1e-9;
  Mlp module(7, 4096);
  DistributedDataParallel model(module, group(), with_cap(1e-6));
  auto optimizer = make_optimizer(model, rule(true));
  const auto x = batch_of(rank(), 1, 4);
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    auto loss = model.forward(x).sum();
    optimizer.begin_step({.lr = kTiny});
    loss.backward();
    if (step < 2) {
      optimizer.step(kTiny);
    }
  }
  const auto seen = model.forward(x).detach().clone();
  torch::cuda::synchronize();
  CHECK(torch::equal(seen, module->forward(x).detach()));
}
