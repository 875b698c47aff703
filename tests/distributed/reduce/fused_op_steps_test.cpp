// SPDX-License-Identifier: Apache-2.0
// Whole training steps of ops that write gradients straight into buckets: recomputed, accumulated
// under no_sync() and with ZeRO-1. On GPUs a GraphedStep captures them, on a CPU it runs them.
#include "ddp/core/error.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/train/graphed_step.hpp"
#include "distributed/reduce/fused_op_models.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

using Tensors = std::vector<torch::Tensor>;

constexpr double kRate = 1.0 / 64;  // small: these losses have no minimum

struct StepKind {
  bool recomputed, zero1, accumulates;
};

std::vector<StepKind> step_kinds() {
  std::vector<StepKind> kinds;
  for (const bool recomputed : {false, true}) {
    for (const bool zero1 : {false, true}) {
      for (const bool accumulates : {false, true}) {
        kinds.push_back({recomputed, zero1, accumulates});
      }
    }
  }
  return kinds;
}

GraphedStepOptions step_options() {
  return {.mode = context().device().is_cuda() ? CudaGraph::On : CudaGraph::Off};
}

/// A step of one op beside plain LibTorch. Each step begins with equal parameters and compares by
/// how much they moved.
class OpSteps {
 public:
  OpSteps(const FusedOp& op, const StepKind& kind) : kind_(kind), runs_(op, /*is_one=*/true) {
    if (kind.recomputed) {
      runs_.ours.set_recomputed();
    }
    runs_.wrap(/*both=*/false);
    rule_ = make_optimizer(*runs_.model_a, {.type = OptimizerType::Sgd, .zero1 = kind.zero1});
    step_.emplace(
        context(), GraphedParts{.models = {runs_.model_a.get()}, .optimizers = {rule_.get()}},
        [this](const Tensors& batch, const StepScalars& scalars) { return run(batch, scalars); },
        step_options());
  }

  void set_trained(const std::vector<bool>& trained) { runs_.set_trained(trained); }

  void check_steps(int count) {
    for (int i = 0; i < count; ++i) {
      CAPTURE(number_);
      check_step(number_++);
    }
  }
  int64_t replayed() const { return step_->counts().replayed; }

 private:
  int64_t num_batches() const { return kind_.accumulates ? 2 : 1; }
  static int64_t seed_of(int64_t number, int64_t micro) { return 10 * number + micro; }

  Tensors run(const Tensors& batch, const StepScalars& scalars) {
    runs_.ours.zero_grad();
    torch::Tensor sum;
    for (size_t micro = 0; micro < batch.size(); ++micro) {
      std::optional<NoSync> local;
      if (micro + 1 < batch.size()) {
        local.emplace(*runs_.model_a);
      }
      const auto loss = runs_.model_a->forward(batch[micro].detach().requires_grad_());
      loss.backward();
      sum = sum.defined() ? sum + loss.detach() : loss.detach();
    }
    rule_->step(scalars);
    return {sum};
  }

  void check_step(int64_t number) {
    const auto ours = runs_.ours.parameters(), plain = runs_.plain.parameters();
    Tensors before;
    for (size_t i = 0; i < ours.size(); ++i) {
      const torch::NoGradGuard no_grad;
      before.push_back(ours[i].detach().clone());
      plain[i].copy_(ours[i]);
    }
    Tensors batch;
    runs_.plain.zero_grad();
    for (int64_t micro = 0; micro < num_batches(); ++micro) {
      batch.push_back(op_input(runs_.op(), rank(), seed_of(number, micro)).detach());
      mean_loss(runs_.plain.a, seed_of(number, micro)).backward();
    }
    (*step_)(batch, {.lr = kRate, .step = number});
    for (size_t i = 0; i < ours.size(); ++i) {
      INFO("parameter " << i);
      const auto grad = plain[i].grad();
      OpRuns::require_close(ours[i].detach() - before[i],
                            grad.defined() ? grad * -kRate : torch::zeros_like(before[i]));
    }
  }

  const StepKind kind_;
  OpRuns runs_;
  std::unique_ptr<Optimizer> rule_;
  std::optional<GraphedStep<Tensors, Tensors>> step_;
  int64_t number_ = 0;
};

/// Steps with `trained` parameters, then with all of them.
void check_op(const FusedOp& op, const StepKind& kind, const std::vector<bool>& trained) {
  CAPTURE(op.name, kind.recomputed, kind.zero1, kind.accumulates, trained);
  const std::vector<bool> all(trained.size(), true);
  OpSteps steps(op, kind);
  steps.set_trained(trained);
  const bool is_graphed = context().device().is_cuda();
  steps.check_steps(is_graphed ? 7 : 2);
  const auto replayed = steps.replayed();
  CHECK((replayed > 0) == is_graphed);
  if (trained != all) {
    steps.set_trained(all);  // drops the graphs
    steps.check_steps(is_graphed ? 4 : 2);
    CHECK((steps.replayed() > replayed) == is_graphed);
  }
}

}  // namespace

TEST_CASE("steps of ops, recomputed or not, with ZeRO-1 or not, with accumulation or not") {
  for (const auto& op : fused_ops(context().device())) {
    for (const auto& kind : step_kinds()) {
      check_op(op, kind, std::vector<bool>(op.parameters.size(), true));
    }
  }
}

TEST_CASE("recomputed, accumulated steps with ZeRO-1 of ops with frozen parameters") {
  for (const auto& op : fused_ops(context().device())) {
    for (const auto& trained : choices_of_trained(op)) {
      check_op(op, {.recomputed = true, .zero1 = true, .accumulates = true}, trained);
    }
  }
}
