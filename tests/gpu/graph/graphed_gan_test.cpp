// SPDX-License-Identifier: Apache-2.0
// Two captured steps that take turns, with a model that only one of them trains.
#include "gpu/graph/graphed_step_test.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

constexpr int kGanSteps = 40;

torch::nn::Sequential make_mlp(int64_t inputs, int64_t outputs) {
  torch::manual_seed(5 * outputs);
  torch::nn::Sequential mlp(torch::nn::Linear(inputs, 16), torch::nn::BatchNorm1d(16),
                            torch::nn::ReLU(), torch::nn::Linear(16, outputs));
  mlp->to(context().device());
  return mlp;
}

torch::Tensor loss_of(const torch::Tensor& logits, double label) {
  return torch::binary_cross_entropy_with_logits(logits, torch::full_like(logits, label));
}

/// A generator and a discriminator, each with its own GraphedStep. The discriminator is frozen in
/// the generator's step: by the step itself, or around its call.
class Gan {
 public:
  Gan(CudaGraph mode, bool freezes_inside)
      : freezes_inside_(freezes_inside),
        d_step_(
            context(), {.models = {&generator_, &discriminator_}, .optimizers = {d_rule_.get()}},
            [this](const at::Tensor& real, const StepScalars& scalars) {
              return train_discriminator(real, scalars);
            },
            GraphedStepOptions{.mode = mode, .name = "discriminator"}),
        g_step_(
            context(), {.models = {&generator_, &discriminator_}, .optimizers = {g_rule_.get()}},
            [this](const at::Tensor& real, const StepScalars& scalars) {
              return train_generator(real.size(0), scalars);
            },
            GraphedStepOptions{.mode = mode, .name = "generator"}) {
    torch::manual_seed(static_cast<uint64_t>(11 + rank()));
  }

  /// With `differ` each rank gets its smaller batches in other calls than the other ranks. The
  /// discriminator trains `num_critic` times a round.
  void run(bool differ, int num_critic) {
    for (int i = 0; i < kGanSteps; ++i) {
      const auto real = batch_of(rank(), i, 4, (i + (differ ? rank() : 0)) % 7 == 6 ? 5 : 8);
      for (int k = 0; k < num_critic; ++k) {
        losses_.push_back(d_step_(real, {.lr = 0.01, .step = i}).log[0]);
      }
      const auto d_grads = grads_of(*discriminator_.module());
      set_frozen(!freezes_inside_);
      losses_.push_back(g_step_(real, {.lr = 0.01, .step = i}).log[0]);
      set_frozen(false);
      require_equal(grads_of(*discriminator_.module()), d_grads);
    }
  }

  /// Weights, gradients and BatchNorm statistics.
  std::vector<at::Tensor> tensors() {
    std::vector<at::Tensor> all;
    for (auto* model : {&generator_, &discriminator_}) {
      const auto grads = grads_of(*model->module());
      all.insert(all.end(), grads.begin(), grads.end());
      for (const auto& parameter : model->module()->parameters()) {
        all.push_back(parameter.detach().clone());
      }
      for (const auto& buffer : model->module()->buffers()) {
        all.push_back(buffer.clone());
      }
    }
    return all;
  }
  const std::vector<double>& losses() const { return losses_; }
  std::vector<GraphedStepCounts> counts() const { return {d_step_.counts(), g_step_.counts()}; }

 private:
  using Step = GraphedStep<at::Tensor, at::Tensor>;

  void set_frozen(bool frozen) {
    for (const auto& parameter : discriminator_.module()->parameters()) {
      parameter.set_requires_grad(!frozen);
    }
  }

  at::Tensor noise(int64_t size) const { return torch::randn({size, 4}, on_device()); }

  at::Tensor train_discriminator(const at::Tensor& real, const StepScalars& scalars) {
    at::Tensor fake;
    {
      const torch::NoGradGuard no_grad;
      fake = generator_.forward(noise(real.size(0)));
    }
    discriminator_.zero_grad();
    const auto logits = discriminator_.forward(torch::cat({real, fake})).chunk(2);
    const auto loss = loss_of(logits[0], 1) + loss_of(logits[1], 0);
    loss.backward();
    d_rule_->step(scalars);
    return loss.detach();
  }

  at::Tensor train_generator(int64_t size, const StepScalars& scalars) {
    if (freezes_inside_) {
      set_frozen(true);
    }
    generator_.zero_grad();
    const auto loss = loss_of(discriminator_.forward(generator_.forward(noise(size))), 1);
    loss.backward();
    g_rule_->step(scalars);
    if (freezes_inside_) {
      set_frozen(false);
    }
    return loss.detach();
  }

  DistributedDataParallel<torch::nn::Sequential> generator_{make_mlp(4, 4), group()};
  DistributedDataParallel<torch::nn::Sequential> discriminator_{make_mlp(4, 1), group()};
  std::unique_ptr<Optimizer> g_rule_ =
      make_optimizer(generator_, OptimizerOptions{.type = OptimizerType::Adam});
  std::unique_ptr<Optimizer> d_rule_ =
      make_optimizer(discriminator_, OptimizerOptions{.type = OptimizerType::Adam});
  const bool freezes_inside_;
  Step d_step_, g_step_;
  std::vector<double> losses_;
};

}  // namespace

TEST_CASE("a GAN's two captured steps give the bits of eager ones, BatchNorm's statistics too") {
  const bool freezes_inside = GENERATE(false, true);
  const bool differ = GENERATE(false, true);
  const int num_critic = GENERATE(1, 3);
  CAPTURE(freezes_inside, differ, num_critic);
  Gan eager(CudaGraph::Off, freezes_inside);
  eager.run(differ, num_critic);
  Gan graphed(CudaGraph::On, freezes_inside);
  graphed.run(differ, num_critic);
  const auto counts = graphed.counts();
  // Of whole and of smaller batches. On several ranks rank 0's buffers are sent before the
  // discriminator's first step of a round, which therefore has graphs of its own.
  const bool has_first = num_critic > 1 && world() > 1;
  REQUIRE(counts[0].captures == (has_first ? 4 : 2));
  REQUIRE(counts[1].captures == 2);
  REQUIRE(counts[0].replayed > num_critic * kGanSteps - 20);
  REQUIRE(counts[1].replayed > kGanSteps - 12);
  REQUIRE(graphed.losses() == eager.losses());
  require_equal(graphed.tensors(), eager.tensors());
  REQUIRE(eager.losses().front() != eager.losses().back());
}
