// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/checkpoint.hpp"

#include <chrono>
#include <exception>
#include <optional>
#include <set>
#include <utility>

#include "core/control/rank_position.hpp"
#include "core/log/error_text.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/core/stop_signal.hpp"
#include "optim/torch_optimizer.hpp"
#include "train/checkpoint/checkpoint_impl.hpp"

namespace ddp {
namespace detail {
namespace {

using Clock = CheckpointSchedule::Clock;

void check_names(const std::vector<StatefulRef>& objects) {
  std::set<std::string> names;
  for (const auto& object : objects) {
    const auto name = object.name();
    const bool plain = !name.empty() && name.find_first_not_of(
                                            "abcdefghijklmnopqrstuvwxyz"
                                            "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                            "0123456789_-") == std::string::npos;
    if (!plain || name.starts_with("rank_") || name == "rng") {
      throw SettingsError(
          "a Checkpointer's object is named '" + name +
          "'; fix: use a name of letters, digits, '_' and '-' that is not 'rng' and "
          "does not start with 'rank_'");
    }
    if (!names.insert(name).second) {
      throw SettingsError("two of a Checkpointer's objects are named '" + name +
                          "'; fix: give one another name in the list, {\"other_" + name +
                          "\", object}");
    }
  }
}

// Otherwise the first save, maybe hours later, would be the first to fail.
void require_savable(const std::vector<StatefulRef>& objects) {
  for (const auto& object : objects) {
    if (const auto* wrapped = dynamic_cast<const TorchOptimizer*>(&object.get())) {
      wrapped->require_savable();
    }
  }
}

// The best checkpoint is older than the newest one. A run that trained on from it would mix two
// histories in one folder, and start from it again after each restart.
CheckpointOptions without_saves_of_best(CheckpointOptions options) {
  options.read_only = options.read_only || options.resume == Resume::Best;
  return options;
}

}  // namespace

CheckpointerImpl::CheckpointerImpl(ControlPlane& control_plane, at::Device device,
                                   const CheckpointOptions& options,
                                   std::vector<StatefulRef> objects, FileOps& ops,
                                   const Context* context)
    : control_plane_(control_plane),
      device_(device),
      options_(without_saves_of_best(options)),
      launch_(context == nullptr ? LaunchEnvironment() : context->launch()),
      objects_(std::move(objects)),
      context_(context == nullptr ? std::nullopt : std::optional(ContextHandle(*context))),
      stop_check_(stop_requested),
      exceptions_(std::uncaught_exceptions()),
      dir_(ops, options, launch_.job_id),
      texts_(options_, context == nullptr ? nullptr : context->communicator(),
             control_plane.rank() == 0),
      history_(options, control_plane.rank() == 0),
      schedule_(options, Clock::now()),
      saver_(control_plane, device, options,
             {.dir = dir_, .texts = texts_, .history = history_, .objects = objects_}) {
  options.usage.set();
  check_names(objects_);
  if (enabled()) {
    require_savable(objects_);
  }
}

CheckpointerImpl::~CheckpointerImpl() {
  try {
    if (std::uncaught_exceptions() == exceptions_) {
      const ActivityScope activity(control_plane_, "save");
      finish_pending();  // without after_save_, whose objects may be gone
      if (history_.failure()) {
        defer_failure(*history_.failure());
      }
    } else {
      // An exception is unwinding, so this does not wait for other ranks. The next run removes the
      // unfinished folder.
      saver_.wait_for_writer();
    }
  } catch (const SaveFailure& failure) {
    defer_failure(failure);
    if (context_ && control_plane_.rank() == 0) {
      log_error(failure.what());
    }
  } catch (const std::exception& error) {
    log_error("the last checkpoint was not saved: " + message_of(error));
  }
}

void CheckpointerImpl::defer_failure(const SaveFailure& failure) const {
  if (context_) {
    context_->defer_failure(failure.cause());
  } else {
    log_error(failure.what());  // without a Context nothing else reports it
  }
}

int64_t CheckpointerImpl::restore() {
  const auto restored = restore_checkpoint({.control_plane = control_plane_,
                                            .device = device_,
                                            .options = options_,
                                            .launch = launch_,
                                            .dir = dir_,
                                            .texts = texts_,
                                            .objects = objects_});
  if (restored) {
    history_.record_restored(*restored);
  }
  const int64_t next_step = restored ? restored->done : 0;
  if (context_) {
    context_->set_progress(next_step, "");
  }
  return next_step;
}

void CheckpointerImpl::require_saving() const {
  if (options_.read_only) {
    throw SettingsError(concat(
        "checkpoint.dir=", options_.dir, " is only read, but this program trains and saves: ",
        options_.resume == Resume::Best
            ? concat("checkpoint.resume=best is for evaluation; fix: set train.max_steps=",
                     last_saved_step(), " to evaluate, or train on from a copy: copy this ",
                     "checkpoint's folder into another checkpoint.dir and set ",
                     "checkpoint.resume=auto")
            : "the Checkpointer is read_only; fix: use another Checkpointer to save"));
  }
}

void CheckpointerImpl::save(int64_t step, std::optional<double> metric) {
  if (!enabled()) {
    return;
  }
  const ActivityScope activity(control_plane_, "save");
  history_.record_call(step);
  const SavedStep next{step + 1, metric.has_value()};
  if (const auto saving = saver_.in_progress(); saving && history_.would_repeat(*saving, next)) {
    return;
  }
  finish_pending();
  call_after_save();
  if (history_.would_repeat(history_.newest(), next)) {
    return;
  }
  begin_save(next.done, metric);
  if (!options_.async) {
    finish_pending();
    call_after_save();
  }
}

void CheckpointerImpl::begin_save(int64_t done, std::optional<double> metric) {
  require_saving();
  schedule_.record_save(Clock::now());
  saver_.begin(done, metric, before_save_ ? before_save_() : "");
}

void CheckpointerImpl::wait() {
  const ActivityScope activity(control_plane_, "save");
  finish_pending();
  call_after_save();
  if (const auto failure = history_.take_failure()) {
    throw SaveFailure(*failure);
  }
}

std::vector<RankStatus> CheckpointerImpl::exchange() {
  const RankStatus own{.stop = stop_check_ && stop_check_(),
                       .due_by_time = schedule_.is_due_by_time(Clock::now()),
                       .step_seconds = schedule_.step_seconds(),
                       .pause_seconds = schedule_.pause_seconds(),
                       .writer = saver_.status()};
  auto statuses = exchange_statuses(control_plane_, own);
  if (const auto committed = saver_.advance(statuses); !committed.empty()) {
    new_checkpoint_ = dir_.path_of(committed);
  }
  return statuses;
}

// Apart from exchange(), whose duration decides how rarely the ranks exchange.
void CheckpointerImpl::call_after_save() {
  const auto folder = std::exchange(new_checkpoint_, {});
  if (!folder.empty() && after_save_) {
    after_save_(last_saved_step(), folder);
  }
}

void CheckpointerImpl::finish_pending() {
  while (saver_.in_progress()) {
    saver_.wait_for_writer();
    exchange();
  }
}

// The job may be killed soon, so after_save_ runs only after the last save. An exception of
// after_save_ is thrown after before_stop_, because the other ranks wait there.
void CheckpointerImpl::call_hooks_of_stop(int64_t done) {
  std::exception_ptr error;
  if (last_saved_step() == done) {
    try {
      call_after_save();
    } catch (...) {
      error = std::current_exception();
    }
  }
  call_before_stop(done);
  if (error) {
    std::rethrow_exception(error);
  }
}

// Waits for all ranks, because a rank that exits early would abort the others' before_stop_.
void CheckpointerImpl::call_before_stop(int64_t done) {
  if (before_stop_) {
    before_stop_(done);
    control_plane_.barrier();
  }
}

void CheckpointerImpl::save_for_stop(int64_t done) {
  const ActivityScope activity(control_plane_, "save");
  finish_pending();
  if (last_saved_step() != done) {
    begin_save(done, std::nullopt);
    finish_pending();
  }
}

void CheckpointerImpl::stop(int64_t step, const std::string& who) {
  if (!enabled()) {
    call_before_stop(step + 1);
    // Not Stop: its exit code requests a restart, which would begin at step 0 forever.
    throw Error(ExitCode::UserException,
                concat(who, ": stopped after ", step + 1,
                       " steps, no checkpoint was saved because checkpoint.dir is empty; fix: set "
                       "checkpoint.dir to a folder that all ranks see"));
  }
  std::optional<SaveFailure> failure;
  try {
    save_for_stop(step + 1);
  } catch (const SaveFailure& error) {
    failure = error;  // of the last attempt that checkpoint.max_failures allows
  }
  call_hooks_of_stop(step + 1);
  if (last_saved_step() != step + 1) {
    if (!failure) {
      failure = history_.take_failure();
    }
    throw SaveFailure(failure ? failure->rank : 0,
                      concat(who, ": stopped after ", step + 1, " steps, but the state is lost: ",
                             failure ? failure->what() : "it could not be saved"));
  }
  throw Stop(concat(who, ": stopped after ", step + 1, " steps, saved in ", options_.dir));
}

void CheckpointerImpl::save_if_due(int64_t step) {
  require_saving();
  if (control_plane_.world_size() > 1) {
    refuse_in_uneven_loop("checkpoint check");
  }
  history_.record_call(step);
  const int64_t done = step + 1;
  bool due = schedule_.is_due_by_steps(done);
  if (schedule_.is_exchange_due(done)) {
    schedule_.begin_exchange(done, Clock::now());
    const ActivityScope activity(control_plane_, "checkpoint check");
    const auto statuses = exchange();
    schedule_.end_exchange(done, Clock::now(), slowest_step(statuses), statuses[0].pause_seconds);
    due = due || statuses[0].due_by_time;
    if (const auto who = stop_reason(statuses, &RankStatus::stop); !who.empty()) {
      stop(step, who);
    }
    call_after_save();
  }
  if (due) {
    save(step, std::nullopt);
  }
}

}  // namespace detail

StatefulRef::StatefulRef(const std::string& name, Stateful* object) : object_(object), name_(name) {
  if (object_ == nullptr) {
    throw SettingsError("a Checkpointer's list holds an empty pointer; fix: make the object first");
  }
}

Checkpointer::Checkpointer(const Context& context, const CheckpointOptions& options,
                           std::vector<StatefulRef> objects)
    : impl_(std::make_unique<detail::CheckpointerImpl>(context.control_plane(), context.device(),
                                                       options, std::move(objects),
                                                       system_file_ops(), &context)) {}

Checkpointer::Checkpointer(ControlPlane& control_plane, at::Device device,
                           const CheckpointOptions& options, std::vector<StatefulRef> objects)
    : impl_(std::make_unique<detail::CheckpointerImpl>(control_plane, device, options,
                                                       std::move(objects))) {}

Checkpointer::~Checkpointer() = default;

int64_t Checkpointer::restore() {
  return impl_->restore();
}
void Checkpointer::save_if_due(int64_t step) {
  impl_->save_if_due(step);
}
void Checkpointer::save(int64_t step, std::optional<double> metric) {
  impl_->save(step, metric);
}
void Checkpointer::stop(int64_t step, const std::string& who) {
  impl_->stop(step, who);
}
void Checkpointer::wait() {
  impl_->wait();
}
int64_t Checkpointer::last_saved_step() const {
  return impl_->last_saved_step();
}

void Checkpointer::set_text(const std::string& name, const std::string& text) {
  impl_->texts().set(name, text);
}

std::string Checkpointer::text(const std::string& name) const {
  return impl_->texts().get(name);
}

void Checkpointer::set_stop_check(std::function<bool()> stop_check) {
  impl_->set_stop_check(std::move(stop_check));
}

void Checkpointer::set_before_save(std::function<std::string()> why_not_finite) {
  impl_->set_before_save(std::move(why_not_finite));
}

void Checkpointer::set_after_save(std::function<void(int64_t, const std::string&)> after_save) {
  impl_->set_after_save(std::move(after_save));
}

void Checkpointer::set_before_stop(std::function<void(int64_t)> before_stop) {
  impl_->set_before_stop(std::move(before_stop));
}

}  // namespace ddp
