// SPDX-License-Identifier: Apache-2.0
// Finds a device that computes wrongly (train.replay_check_every). Forward and backward of a step
// run a second time on the same inputs, and must give the same gradients before they are reduced:
//
//   rehearsal | forward, backward, a hash of each bucket; nothing is sent
//   restore   | gradients, buffers, generators and the host's state
//   step      | forward, backward, a hash of each bucket before its reduction, update
//   host      | compares the hashes
//
// A captured step has two further graphs for this, which checked steps replay in place of its own.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/train/graphed_step.hpp"
#include "reduce/buckets/gradient_probe.hpp"

namespace ddp::detail {

class ReplayCheck {
 public:
  /// `parts` outlives this object.
  ReplayCheck(Context& context, const GraphedParts& parts, const GraphedStepOptions& options);
  ~ReplayCheck();

  /// Call at the start of each step. Returns whether it is checked, the same on all ranks, because
  /// a rehearsed forward may call collectives. A check that a step does not allow stays due.
  bool begin_step();

  using Function = std::function<void()>;
  /// Runs `rehearsal`, which RehearsalEnd ends, and restores what it changed. Then runs `step`
  /// and compares. Throws MismatchError if this device gave different gradients.
  ///
  /// Checks rehearse twice until two rehearsals agree on all ranks. If they differ, that is an
  /// error with deterministic algorithms. Without them it is logged once, and a later step is
  /// checked. A check stays due if the rehearsal reduced nothing. `inputs` are restored too.
  void run(const Function& rehearsal, const Function& step,
           const std::vector<at::Tensor>& inputs = {});
  /// The same of a call that runs eagerly.
  StepOutput run_eager(const StepCall& call, const StepScalars& scalars);

  /// While it lives, the models' backwards are recorded.
  class Recording {
   public:
    Recording(const ReplayCheck& check, bool is_rehearsal);
    ~Recording();
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;

   private:
    const ReplayCheck& check_;
  };

 private:
  struct Saved;
  using Probes = std::vector<std::unique_ptr<GradientProbe>>;  // one per model

  const Probes& probes(bool is_rehearsal) const { return is_rehearsal ? rehearsed_ : real_; }
  bool can_check() const;
  bool agree_any(bool mine) const;
  bool has_gradients(const at::Tensor& rehearsed);
  bool repeats(const at::Tensor& rehearsed, const at::Tensor& again);
  at::Tensor rehearse(const Function& rehearsal, const std::vector<at::Tensor>& inputs);
  at::Tensor hashes(const Probes& probes) const;
  void clear(const Probes& probes) const;
  [[noreturn]] void fail(const at::Tensor& rehearsed, const at::Tensor& real) const;
  std::string bucket_text(int64_t index) const;

  Context& context_;
  const GraphedParts& parts_;
  const int64_t every_;
  const std::string name_;
  Probes rehearsed_, real_;
  int64_t num_steps_ = 0;
  int64_t last_equal_step_ = 0;  // 0: none
  int64_t num_empty_ = 0;        // rehearsals in a row that reduced nothing
  bool is_due_ = false;          // since some step
  bool has_repeated_ = false;    // two rehearsals agreed on all ranks
  bool has_warned_ = false;      // of rehearsals that differ
};

/// nullptr if options.replay_check_every is 0.
std::unique_ptr<ReplayCheck> make_replay_check(Context& context, const GraphedParts& parts,
                                               const GraphedStepOptions& options);

}  // namespace ddp::detail
