// SPDX-License-Identifier: Apache-2.0
#include "ddp/reduce/join.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

#include "core/control/rank_position.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "reduce/model/join_scope.hpp"
#include "reduce/model/model_parts.hpp"

namespace ddp {
namespace {

constexpr int64_t kActive = 1;
constexpr int64_t kSynchronised = 2;
constexpr int64_t kSendsBuffers = 4;

void warn_of_missed_steps() {
  static std::once_flag once;
  std::call_once(once, [] {
    log_warning(
        "join: this rank ran out of inputs before others and missed their optimizer steps. It got "
        "their parameters, but not momentum, other optimizer state or a loss scale, so later steps "
        "may differ between ranks; fix: join(model, step, has_batch), in which all ranks step");
  });
}

}  // namespace

JoinScope::JoinScope(DataParallelModel& model, const JoinOptions& options)
    : model_(model), options_(options) {
  if (model.parts_->join != nullptr) {
    throw SettingsError("join: this model is already inside a join; fix: end that join first");
  }
  model_.parts_->update_frozen();
  model_.parts_->join = this;
  // Here and at the end, on all ranks: in between some run fewer forwards than others, or none.
  model_.reducer().buffers().set_state({});
  model_.parts_->reducer->mean().require_counts(options_.weighted);
  model_.parts_->reducer->mean().set_in_join(true);
}

JoinScope::~JoinScope() {
  model_.parts_->join = nullptr;
  model_.parts_->reducer->mean().require_counts(false);
  model_.parts_->reducer->mean().set_in_join(false);
  model_.parts_->reducer->mean().set_divisor(0);
}

// Exchanges one value per rank. The host waits, because the next step depends on it.
std::vector<int64_t> JoinScope::exchange(int64_t flags) {
  auto& communicator = *model_.communicator();
  auto mine =
      at::full({1}, flags, at::TensorOptions().dtype(at::kLong).device(communicator.device()));
  auto all = at::empty({communicator.world_size()}, mine.options());
  communicator.all_gather(all, mine)->wait();
  all = all.cpu();
  return {all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + all.numel()};
}

void JoinScope::apply(const std::vector<int64_t>& flags) {
  int active = 0;
  for (size_t rank = 0; rank < flags.size(); ++rank) {
    if ((flags[rank] & kActive) != 0) {
      ++active;
      highest_active_ = static_cast<int>(rank);
    }
  }
  if (options_.throw_on_early_termination && active != 0 &&
      active < static_cast<int>(flags.size())) {
    const auto joined = std::find_if(flags.begin(), flags.end(),
                                     [](int64_t value) { return (value & kActive) == 0; });
    throw MismatchError(concat("join: rank ", joined - flags.begin(),
                               " ran out of inputs before the others and "
                               "JoinOptions::throw_on_early_termination is set"));
  }
  uneven_ = uneven_ || (active != 0 && active < static_cast<int>(flags.size()));
  if (!options_.divide_by_initial_world_size && active != 0) {
    model_.parts_->reducer->mean().set_divisor(active);
  }
}

void JoinScope::announce_forward(bool synchronised, bool sends_buffers) {
  const int64_t num_passes = model_.parts_->reducer->num_passes();
  if (synchronised && std::exchange(passes_before_forward_, num_passes) == num_passes) {
    throw SettingsError(
        "join: a second forward ran before the backward of the first, but ranks that ran out "
        "answer "
        "every forward with a backward of zeros; fix: run one backward after each forward, or the "
        "first forward under no_sync()");
  }
  apply(
      exchange(kActive | (synchronised ? kSynchronised : 0) | (sends_buffers ? kSendsBuffers : 0)));
}

void JoinScope::finish() {
  auto& reducer = *model_.parts_->reducer;
  reducer.join_broken_backward();
  std::optional<Reducer::Local> own;
  bool missed_steps = false;
  while (true) {
    const auto flags = exchange(0);
    const bool any_active = std::any_of(flags.begin(), flags.end(),
                                        [](int64_t value) { return (value & kActive) != 0; });
    if (!any_active) {
      break;
    }
    if (!own) {
      own = reducer.take_local();
    }
    apply(flags);
    const int64_t step = flags[static_cast<size_t>(highest_active_)];
    if ((step & kSynchronised) != 0) {
      reducer.begin_forward();
    }
    if ((step & kSendsBuffers) != 0) {
      model_.sync_buffers(highest_active_);
    }
    if ((step & kSynchronised) != 0) {
      if (options_.weighted) {
        reducer.mean().add(0);
      }
      reducer.run_backward_with_zeros();
      reducer.gradients().drop();  // else the next one would keep these means
      missed_steps = true;
    }
  }
  if (missed_steps) {
    warn_of_missed_steps();
  }
  if (own) {
    reducer.restore_local(*own);
  }
  // If all ranks ended together, weights and masters are already equal, so the masters are not
  // reset.
  model_.sync_module_states(highest_active_, /*exactly=*/uneven_);
  reducer.buffers().set_state({});
}

void join(DataParallelModel& model, const std::function<void()>& loop, const JoinOptions& options) {
  if (detail::all_tensors(model).has_collective_forward) {
    throw SettingsError(
        "join(model, loop) does not support SyncBatchNorm, because its forward is collective; fix: "
        "use join(model, step, has_batch)");
  }
  if (model.reducer().gradients().is_sharded()) {
    throw SettingsError(
        "join(model, loop) does not support optimizer.zero1=true, because ranks without input must "
        "still update their part of the weights; fix: use join(model, step, has_batch), or set "
        "optimizer.zero1=false");
  }
  detail::join_listeners(model).notify();
  JoinScope scope(model, options);
  {
    std::optional<detail::UnevenLoop> uneven;
    if (!options.throw_on_early_termination) {  // with it no rank goes on alone
      uneven.emplace();
    }
    loop();
  }
  scope.finish();
}

void join(DataParallelModel& model, const std::function<void(bool)>& step,
          const std::function<bool()>& has_batch) {
  auto& communicator = *model.communicator();
  while (true) {
    const bool mine = has_batch();
    auto any = at::full({1}, mine ? int64_t{1} : int64_t{0},
                        at::TensorOptions().dtype(at::kLong).device(communicator.device()));
    communicator.all_reduce(any, ReduceOp::Max)->wait();
    if (any.item<int64_t>() == 0) {
      return;
    }
    step(mine);
  }
}

}  // namespace ddp
