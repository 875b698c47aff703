// SPDX-License-Identifier: Apache-2.0
// Saving and resuming a training run.
//
//   ddp::Checkpointer checkpointer(ctx, cfg.checkpoint, {model, optimizer, scaler, loader});
//   for (auto step = checkpointer.restore(); step < max_steps; ++step) {
//     …
//     checkpointer.save_if_due(step);
//   }
//
// A checkpoint is a folder checkpoint.dir/step_<steps done>: safetensors files and a manifest with
// the checksum of each. model.safetensors holds parameters and buffers under the module's names
// (where the optimizer keeps an fp32 master of a bf16 leaf: the master); <object>.safetensors the
// tensors of each other object as <object>.<key>, so optimizer.state.<parameter>.<slot>;
// rank_<r>.safetensors what each rank alone knows: states of the random generators, and entries of
// any object whose key starts with "rank_local.". Small values, the resolved settings and the plan
// stand in the manifest.
//
// Resuming gives the bits back: parameters, optimizer, scaler, sampler position, generators.
//
// A checkpoint whose tensors hold inf or NaN is saved like any other and counts as not finite: it
// pushes no finite one out, and restore() takes it only where no finite one is there.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "ddp/comm/context.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/core/state_dict.hpp"
#include "ddp/train/checkpoint_options.hpp"

namespace ddp {

namespace detail {
class CheckpointerImpl;
}

/// An object, or a smart pointer to one, as an element of a Checkpointer's list; with a name where
/// its state_name() is another object's too:
///
///   {{"generator", generator}, {"generator_optimizer", optimizer}, discriminator, …}
class StatefulRef {
 public:
  StatefulRef(Stateful& object) : object_(&object) {}  // NOLINT(google-explicit-constructor)
  template <typename Pointer>
  requires requires(Pointer& pointer) { static_cast<Stateful*>(pointer.get()); }
  StatefulRef(Pointer& pointer) : object_(pointer.get()) {}  // NOLINT(google-explicit-constructor)
  template <typename Object>
  StatefulRef(std::string name, Object& object) : StatefulRef(object) {
    name_ = std::move(name);
  }
  Stateful& get() const { return *object_; }
  /// Under which a checkpoint keeps it: the name given here, else state_name().
  std::string name() const { return name_.empty() ? object_->state_name() : name_; }

 private:
  Stateful* object_;
  std::string name_;
};

/// All methods are collective: every rank calls them in the same order with the same arguments,
/// from the thread that trains. The objects, and the Context, must outlive it.
class Checkpointer {
 public:
  /// Throws SettingsError where two objects have the same name.
  Checkpointer(const Context& context, const CheckpointOptions& options,
               std::initializer_list<StatefulRef> objects);
  /// The same without a Context; `device` is the one whose random generator this rank uses.
  Checkpointer(ControlPlane& control_plane, at::Device device, const CheckpointOptions& options,
               std::initializer_list<StatefulRef> objects);
  /// Finishes a save under way, unless an exception is unwinding. Where the newest save failed, the
  /// Context's close() throws WriteError, and ddp::run ends with 73.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  /// Loads the newest checkpoint that is whole on every rank and finite, into the objects and the
  /// random generators, and returns the number of steps done: the index of the next step. Where
  /// none is finite it takes the newest whole one. Damaged ones are skipped with a warning that
  /// names the file. 0 where there is none at all. A Context is told that this step begins
  /// (set_progress).
  ///
  /// Throws ReadError (exit code 74) where checkpoints exist but none is whole, or the newest has a
  /// newer format; MismatchError (70) naming the first key where it is of another model;
  /// SettingsError with resume=never in a folder that holds checkpoints, and where `dir` is a file;
  /// WriteError (73) where `dir` cannot be made, or a rank cannot write a small file there.
  ///
  /// One job at a time writes to `dir`: from here (or the first save) to the end of this object
  /// rank 0 keeps a record there, `.owner`, with a counter that moves every two seconds. A record
  /// whose counter moves refuses this start: SettingsError (64) naming host, job and process. Where
  /// that job was asked to stop, or has this job's id (a requeued job), its end is waited for, at
  /// most 120 s. A counter that stood still for 10 s is no owner's any more. A job that lost `dir`
  /// in that way, because it was suspended, gets WriteError (73) from its next save.
  ///
  /// Rank 0 warns of each setting that differs from what the checkpoint was saved with (but for
  /// checkpoint, metrics, context, data and loader), and of a restarted job without a checkpoint.
  int64_t restore();

  /// Call after each step. Saves where every_steps or every_minutes say so. About every
  /// stop_check_seconds the ranks ask each other (one small message through the control plane) how
  /// their writing went and whether one was asked to stop. If so, all save after the same step and
  /// throw Stop (exit code 75); with an empty dir nothing can be saved, and they throw Error (exit
  /// code 1) so that no scheduler starts the job again at step 0.
  ///
  /// A save that fails on any rank is given up on all, its files removed, an error logged, and
  /// training goes on; the max_failures-th in a row throws WriteError (73), and so does wait()
  /// where no later save made it good. Earlier checkpoints stay untouched.
  void save_if_due(int64_t step);

  /// Saves after step `step` now; with `async` it returns once everything is copied to the host.
  /// `metric` decides which checkpoint keep_best keeps; rank 0's counts. A step that is saved
  /// already is not saved again, unless keep_best is on and `metric` is new to it.
  void save(int64_t step, std::optional<double> metric = std::nullopt);

  /// Waits until a save under way is committed. Throws WriteError (73), once, where the newest save
  /// failed: what was trained since the one before it is in no checkpoint. The end of a training
  /// loop; the destructor cannot tell its caller.
  void wait();

  /// Steps done in the newest checkpoint that was committed or restored; -1: none yet.
  int64_t last_saved_step() const;

  /// A text kept with every later checkpoint ("settings" and "plan" come from the options), or,
  /// after restore(), the one that stood in the checkpoint; empty where there is none.
  void set_text(const std::string& name, const std::string& text);
  std::string text(const std::string& name) const;

  /// What says that this rank was asked to stop; default: SIGTERM, SIGUSR1 and SIGINT as caught by
  /// ddp::run.
  void set_stop_check(std::function<bool()> stop_requested);

  /// Called on all ranks before each save, in save() and save_if_due(). A text that it returns on
  /// any rank says why the state is not to be trusted: the checkpoint then counts as not finite.
  void set_before_save(std::function<std::string()> why_not_finite);

  /// Called on all ranks at an agreed stop, with the steps done, when the state is saved (or could
  /// not be) and before save_if_due throws: for what a program keeps beside its checkpoints. The
  /// ranks then wait for each other. Schedulers give a stop little time.
  void set_before_stop(std::function<void(int64_t steps_done)> before_stop);

 private:
  std::unique_ptr<detail::CheckpointerImpl> impl_;
};

}  // namespace ddp
