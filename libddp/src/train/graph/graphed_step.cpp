// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/graphed_step.hpp"

#include <utility>

#include "train/graph/replay_check.hpp"
#include "train/graph/step_ring.hpp"
#include "train/graph/step_runner.hpp"

namespace ddp::detail {
namespace {

void check_options(const GraphedStepOptions& options, at::Device device) {
  if (options.warmup_steps < 1) {
    throw SettingsError(concat("GraphedStep: warmup_steps is ", options.warmup_steps,
                               "; it must be at least 1, because one-time initialization must not "
                               "be captured"));
  }
  if (options.max_graphs < 1) {
    throw SettingsError(concat("GraphedStep: max_graphs is ", options.max_graphs,
                               "; it must be at least 1; fix: CudaGraph::Off captures nothing"));
  }
  if (options.replay_check_every < 0) {
    throw SettingsError(concat("GraphedStep: replay_check_every is ", options.replay_check_every,
                               "; it must be 0 or more"));
  }
  if (options.mode == CudaGraph::On && !device.is_cuda()) {
    throw SettingsError(concat("CUDA graphs are on (train.cuda_graph=on) for ", options.name,
                               ", but this run is on ", device,
                               "; fix: set train.cuda_graph=auto, or context.device=cuda"));
  }
}

/// Runs every call as its lambda, with the host's numbers.
class CpuStepRunner final : public StepRunner {
 public:
  CpuStepRunner(Context& context, GraphedParts parts, const GraphedStepOptions& options,
                std::shared_ptr<GraphPool> pool)
      : pool_(std::move(pool)),
        parts_(std::move(parts)),
        replay_check_(make_replay_check(context, parts_, options)) {}

  StepDone run(StepCall& call) override {
    ++counts_.eager;
    const StepScalars scalars{.lr = call.numbers.lr,
                              .step = static_cast<double>(call.numbers.step)};
    const bool is_checked = replay_check_ != nullptr && replay_check_->begin_step();
    auto output = is_checked ? replay_check_->run_eager(call, scalars) : call.run(scalars);
    auto log = StepRing::log_now(StepRing::scalars_of(output.tensors));
    return {std::move(output.object), log};
  }
  void drop_graphs() override {}
  GraphedStepCounts counts() const override { return counts_; }
  const std::shared_ptr<GraphPool>& pool() const override { return pool_; }
  void end() override {}

 private:
  const std::shared_ptr<GraphPool> pool_;
  const GraphedParts parts_;
  const std::unique_ptr<ReplayCheck> replay_check_;  // nullptr: off
  GraphedStepCounts counts_;
};

std::unique_ptr<StepRunner> make_step_runner(Context& context, GraphedParts parts,
                                             GraphedStepOptions options,
                                             std::shared_ptr<GraphPool> pool) {
  check_options(options, context.device());
#ifdef DDP_HAS_CUDA
  if (context.device().is_cuda()) {
    return make_cuda_step_runner(context, std::move(parts), std::move(options), std::move(pool));
  }
#endif
  return std::make_unique<CpuStepRunner>(context, std::move(parts), options, std::move(pool));
}

}  // namespace

struct GraphedStepCore::State {
  std::unique_ptr<StepRunner> runner;
};

GraphedStepCore::GraphedStepCore(Context& context, GraphedParts parts, GraphedStepOptions options,
                                 std::shared_ptr<GraphPool> pool)
    : state_(std::make_shared<State>(State{
          make_step_runner(context, std::move(parts), std::move(options), std::move(pool))})) {
  context.add_teardown([weak = std::weak_ptr(state_)] {
    if (const auto state = weak.lock()) {
      state->runner->end();
    }
  });
}

GraphedStepCore::~GraphedStepCore() = default;

StepDone GraphedStepCore::run(StepCall& call) {
  return state_->runner->run(call);
}

void GraphedStepCore::drop_graphs() {
  state_->runner->drop_graphs();
}

GraphedStepCounts GraphedStepCore::counts() const {
  return state_->runner->counts();
}

const std::shared_ptr<GraphPool>& GraphedStepCore::pool() const {
  return state_->runner->pool();
}

}  // namespace ddp::detail
