// SPDX-License-Identifier: Apache-2.0
// Saving and resuming a training run.
//
//   ddp::Checkpointer checkpointer(ctx, cfg.checkpoint, {model, optimizer, scaler, loader});
//   for (auto step = checkpointer.restore(); step < max_steps; ++step) {
//     …
//     checkpointer.save_if_due(step);
//   }
//
// A checkpoint is a folder checkpoint.dir/step_<steps done, ten digits>.
// docs/semantics_training.md, "Checkpoints", describes its files, resuming, inf and NaN, and
// folders in use.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ddp/comm/context.hpp"
#include "ddp/detail/stateful_ref.hpp"
#include "ddp/train/options.hpp"

namespace ddp {

namespace detail {
class CheckpointerImpl;
}

/// All methods are collective: every rank calls them in the same order with the same arguments,
/// from the training thread. The objects and the Context (which may move) outlive the Checkpointer.
class Checkpointer {
 public:
  /// A pointer in `objects` must keep pointing to the same object. If two objects have the same
  /// state_name(), give one another name (else SettingsError):
  ///
  ///   {{"generator", generator}, {"generator_optimizer", optimizer}, discriminator, …}
  Checkpointer(const Context& context, const CheckpointOptions& options,
               std::vector<StatefulRef> objects);
  /// The same without a Context. `device` selects this rank's random generator.
  Checkpointer(ControlPlane& control_plane, at::Device device, const CheckpointOptions& options,
               std::vector<StatefulRef> objects);
  /// Finishes a save in progress, unless an exception is unwinding. If the newest save failed, the
  /// Context's close() throws WriteError, and ddp::run returns 73.
  ~Checkpointer();

  /// Loads the newest checkpoint that is complete on every rank and finite, into the objects and
  /// the random generators. Without a finite one, loads the newest complete one. Skips damaged ones
  /// with a warning that names the file. Returns the number of steps done; 0 without checkpoints.
  /// Warns if the steps of the checkpoint took another number of samples, because step numbers then
  /// mean other progress. With same_steps this is a SettingsError.
  ///
  /// Throws
  /// - ReadError (exit code 74) if checkpoints exist but none is complete, if resume=require or
  ///   best finds none, or if a checkpoint examined before a usable one has a newer format;
  /// - MismatchError (70) naming the first key if the checkpoint is of another model;
  /// - SettingsError (64) if `dir` is a file, holds checkpoints and resume=never, or is in use by
  ///   another job (named). Waits up to 120 s for a job that was asked to stop;
  /// - WriteError (73) if `dir` cannot be made, or a rank cannot write a small file there.
  int64_t restore();

  /// Call after each step. Saves when every_steps or every_minutes is due. About every
  /// stop_check_seconds the ranks exchange stop requests and the results of their writes. After a
  /// stop request, all ranks save after the same step and throw Stop (exit code 75). With an empty
  /// dir they throw Error (exit code 1), so that no scheduler restarts the job at step 0. If a save
  /// fails on any rank, all ranks drop it and log an error, and training goes on. After
  /// max_failures failed saves in a row it throws WriteError (73).
  void save_if_due(int64_t step);

  /// Saves now, after step `step`. First waits for a save in progress. With `async`, returns when
  /// the copies to the host are enqueued, and another thread writes the files. keep_best selects by
  /// rank 0's `metric`. Saves a step twice only if keep_best is on and the first save had no
  /// metric.
  void save(int64_t step, std::optional<double> metric = std::nullopt);

  /// Ends the run like save_if_due() at an agreed stop: saves the state after step `step` (-1:
  /// before the first step) and throws Stop, or Error with an empty dir. For stops that the ranks
  /// agreed on elsewhere. `who` is StopPoll::stop_reason(), for the message.
  [[noreturn]] void stop(int64_t step, const std::string& who);

  /// Waits until a save in progress is committed. Throws WriteError (73), once, if the newest save
  /// failed: the steps since the last good checkpoint are then in no checkpoint. Call it at the end
  /// of training, because the destructor cannot throw.
  void wait();

  int64_t last_saved_step() const;  ///< steps done in the newest checkpoint; -1: none yet

  /// Sets a text that every later checkpoint holds. libddp sets "settings" from the options and
  /// "plan" from the communicator. After restore(), text() returns the checkpoint's text, or an
  /// empty one.
  void set_text(const std::string& name, const std::string& text);
  std::string text(const std::string& name) const;  ///< see set_text()

  /// Sets the test for a stop request on this rank. Default: ddp::stop_requested.
  void set_stop_check(std::function<bool()> stop_requested);
  /// Called on all ranks before each save, in save() and save_if_due(). If it returns a text on any
  /// rank, the checkpoint is marked as not finite, and the text is the reason.
  void set_before_save(std::function<std::string()> why_not_finite);
  /// Called on rank 0, in the training thread, after a checkpoint is complete on the disk: inside
  /// the save(), save_if_due() or wait() that detects the commit, with `async` some steps later.
  /// The destructor does not call it: call wait() first. `folder` is kept at least until the next
  /// save. Keep it short: the other ranks wait in their next collective. Call no collectives. An
  /// exception is thrown on rank 0 alone: let it end the run. Checkpoints that are not finite are
  /// reported too. At an agreed stop only the stop's own save is reported, and an exception of this
  /// call is thrown after before_stop.
  void set_after_save(
      std::function<void(int64_t steps_done, const std::string& folder)> after_save);
  /// Called on all ranks at an agreed stop, after the save (or its failure) and before save_if_due
  /// throws, for a program's other files. Keep it short, because the job will be killed soon.
  void set_before_stop(std::function<void(int64_t steps_done)> before_stop);

 private:
  std::unique_ptr<detail::CheckpointerImpl> impl_;
};

}  // namespace ddp
