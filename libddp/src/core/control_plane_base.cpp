// SPDX-License-Identifier: Apache-2.0
#include "core/control_plane_base.hpp"

#include <algorithm>
#include <utility>

#include "core/unwinding.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {
namespace {

using Clock = std::chrono::steady_clock;

// A failing rank waits this long for its message to be sent.
constexpr std::chrono::milliseconds kDeliveryTimeout{1000};

// Interval between looks at the position. An unchanged position is sent.
constexpr int kLooksATelling = 10;
std::chrono::milliseconds look_interval(std::chrono::milliseconds heartbeat) {
  return std::clamp(heartbeat / 10, std::chrono::milliseconds(20), std::chrono::milliseconds(500));
}

// Least interval between progress messages: rank 0 gets at most 1000 per second in total.
std::chrono::milliseconds progress_interval(int world_size) {
  return std::chrono::milliseconds(std::max(10, world_size));
}

void check_root(const char* what, int root, int world_size) {
  if (root < 0 || root >= world_size) {
    throw SettingsError(
        concat("control plane: ", what, " rank ", root, " of a job of ", world_size));
  }
}

}  // namespace

ControlPlaneBase::ControlPlaneBase(const LaunchEnvironment& launch,
                                   const ControlPlaneOptions& options)
    : rank_(launch.rank),
      world_size_(launch.world_size),
      options_(options),
      host_(host_name()),
      clock_(options.heartbeat_interval / 2),
      notes_(static_cast<std::size_t>(launch.world_size)) {}

std::string ControlPlaneBase::broadcast(const std::string& value, int root) {
  check_root("broadcast from", root, world_size_);
  static const std::string nothing;
  return collective(CollectiveKind::Broadcast, static_cast<uint32_t>(root),
                    rank_ == root ? value : nothing)
      .at(0);
}

std::vector<std::string> ControlPlaneBase::all_gather(const std::string& value) {
  return collective(CollectiveKind::AllGather, 0, value);
}

std::vector<std::string> ControlPlaneBase::gather(const std::string& value, int root) {
  check_root("gather to", root, world_size_);
  return collective(CollectiveKind::Gather, static_cast<uint32_t>(root), value);
}

void ControlPlaneBase::barrier() {
  collective(CollectiveKind::Barrier, 0, {});
}

std::vector<std::string> ControlPlaneBase::collective(CollectiveKind kind, uint32_t root,
                                                      const std::string& value) {
  if (value.size() > kMaxValueBytes) {
    throw SettingsError(concat("control plane: a value of ", value.size(), " bytes; the limit is ",
                               kMaxValueBytes));
  }
  if (failure_.failed()) {
    throw_failure(failure_.get());
  }
  refuse_while_unwinding(to_string(kind));
  std::unique_lock lock(mutex_);
  DDP_CHECK(!closed_, to_string(kind), " after close()");
  const uint64_t sequence = next_sequence_++;
  add_caller(caller_);
  contribute({sequence, kind, root, activity(), value});
  if (kind == CollectiveKind::Gather && rank_ != static_cast<int>(root)) {
    return {};
  }
  plane_call_ = sequence + 1;
  // Rank 0 enforces the timeout and names missing ranks. This limit covers a stuck rank 0.
  const auto deadline = clock_.now() + options_.collective_timeout + dead_after();
  const auto complete = [&] {
    const auto found = results_.find(sequence);
    return found != results_.end() && found->second.num_arrived == found->second.values.size();
  };
  const bool in_time = wait_until(lock, deadline, complete);
  plane_call_ = 0;
  if (!in_time) {
    throw PeerLostError(concat("control plane: ", to_string(kind), " was not complete within ",
                               options_.collective_timeout.count(), " ms"));
  }
  auto values = std::move(results_.at(sequence).values);
  results_.erase(sequence);
  return values;
}

void ControlPlaneBase::note_result(ResultPart part) {
  auto& result = results_[part.sequence];
  result.values.resize(part.num_values);
  std::move(part.values.begin(), part.values.end(),
            result.values.begin() + static_cast<std::ptrdiff_t>(part.first));
  result.num_arrived += static_cast<uint32_t>(part.values.size());
  if (result.num_arrived == part.num_values) {
    changed_.notify_all();
  }
}

void ControlPlaneBase::post_note(const std::string& text) {
  const std::lock_guard lock(mutex_);
  keep_note(rank_, text.substr(0, kMaxNoteBytes));
  send_note(text.substr(0, kMaxNoteBytes));
}

std::vector<std::string> ControlPlaneBase::notes() const {
  const std::lock_guard lock(mutex_);
  return notes_;
}

void ControlPlaneBase::keep_note(int rank, std::string text) {
  notes_.at(static_cast<std::size_t>(rank)) = std::move(text);
  notes_version_.fetch_add(1, std::memory_order_release);
}

void ControlPlaneBase::set_progress(int64_t step, const std::string& where) {
  {
    const std::lock_guard lock(progress_mutex_);
    if (step == progress_.step && where == progress_.where) {
      return;
    }
    progress_.step = step;
    progress_.where = where;
  }
  tell_progress();
}

std::string ControlPlaneBase::set_activity(std::string activity) {
  {
    const std::lock_guard lock(progress_mutex_);
    activity_.swap(activity);
  }
  tell_progress();
  return activity;
}

void ControlPlaneBase::outlive_context() {
  {
    const std::lock_guard lock(mutex_);
    probes_.clear();
  }
  failure_.remove_callbacks();
  set_activity(kAfterCloseActivity);
}

// Rank 0 reads its own progress directly.
void ControlPlaneBase::tell_progress() {
  if (rank_ != 0 && !progress_is_new_.exchange(true)) {
    wake_.notify();
  }
}

std::string ControlPlaneBase::activity() const {
  const std::lock_guard lock(progress_mutex_);
  return activity_;
}

Progress ControlPlaneBase::progress() const {
  const std::lock_guard lock(progress_mutex_);
  auto progress = progress_;
  if (!activity_.empty()) {
    progress.where += concat(progress.where.empty() ? "" : ", ", activity_);
  }
  return progress;
}

void ControlPlaneBase::add_probe(Probe probe) {
  const std::lock_guard lock(mutex_);
  probes_.push_back(std::move(probe));
}

// mutex_ keeps the control-plane call unchanged while the communicators are asked. So all answers
// belong to this call.
RankPosition ControlPlaneBase::position() {
  RankPosition position;
  const auto now = progress();
  position.step = now.step;
  position.where = now.where;
  position.plane_call = plane_call_;
  auto caller = caller_;
  std::erase_if(probes_, [&](const Probe& probe) {
    auto group = probe();
    if (!group) {
      return true;
    }
    add_caller(caller, group->caller);
    position.groups.push_back(std::move(*group));
    return false;
  });
  position.one_thread = caller.has_value();
  return position;
}

// Sends the position when a rank waits, about once per heartbeat during the wait, and when it ends.
void ControlPlaneBase::look_at_position(SteadyTime steady) {
  if (steady < next_look_) {
    return;
  }
  next_look_ = steady + look_interval(options_.heartbeat_interval);
  auto now = position();
  const bool stands = now.waits() && last_position_ == now;
  if (stands && num_looks_stood_++ % kLooksATelling == 0) {
    send_position(now);
  } else if (!stands && std::exchange(num_looks_stood_, 0) > 0) {
    send_position({});
  }
  last_position_ = std::move(now);
}

void ControlPlaneBase::publish_failure(const FailureCause& cause) {
  std::unique_lock lock(mutex_);
  if (failure_.failed() || closing_) {
    return;
  }
  FailureCause full = cause;
  if (full.rank < 0) {
    full.rank = rank_;
  }
  if (full.host.empty() && full.rank == rank_) {
    full.host = host_;
  }
  const auto reached = progress();
  if (full.step < 0) {
    full.step = reached.step;
  }
  if (full.where.empty()) {
    full.where = reached.where;
  }
  send_failure(full);
  if (std::this_thread::get_id() != thread_.get_id()) {
    changed_.wait_until(lock, Clock::now() + kDeliveryTimeout,
                        [this] { return failure_was_delivered(); });
  }
  if (failure_.set(full)) {  // no answer came: our own cause counts
    first_cause_is_ours_ = true;
    changed_.notify_all();
  }
  wake_.notify();
}

int ControlPlaneBase::add_failure_callback(std::function<void(const FailureCause&)> callback) {
  return failure_.add_callback(std::move(callback));
}

void ControlPlaneBase::remove_failure_callback(int token) {
  failure_.remove_callback(token);
}

void ControlPlaneBase::close() {
  if (closed_ || failure_.failed()) {
    return;
  }
  collective(CollectiveKind::Close, 0, {});
  std::unique_lock lock(mutex_);
  closed_ = true;
  wait_for_peers_to_leave(lock);
}

void ControlPlaneBase::leave_without_closing() {
  if (closed_) {
    return;
  }
  try {
    FailureCause cause;
    cause.message = "it left before its peers were done";
    publish_failure(cause);
  } catch (const std::exception& error) {
    log_error(concat("control plane: ", error.what()));
  }
}

void ControlPlaneBase::start_thread() {
  thread_ = std::thread([this] {
    try {
      run_thread();
    } catch (const std::exception& error) {
      end_job_with(concat("the control plane's thread ended by an exception: ", error.what()));
    }
  });
}

// Nothing serves the connections any more: peers only get the bytes the sockets take now.
void ControlPlaneBase::end_job_with(const std::string& problem) {
  FailureCause cause;
  cause.rank = rank_;
  cause.host = host_;
  cause.message = problem;
  cause.exit_code = ExitCode::UserException;
  const auto now = progress();
  cause.step = now.step;
  cause.where = now.where;
  {
    const std::lock_guard lock(mutex_);
    try {
      send_failure(cause);
    } catch (const std::exception& error) {
      log_error(concat("control plane: peers were not told: ", error.what()));
    }
    if (failure_.set(cause)) {
      first_cause_is_ours_ = true;
    }
    changed_.notify_all();
  }
  log_first_cause();
  failure_.run_callbacks();
}

void ControlPlaneBase::stop_thread() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    wake_.notify();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

int ControlPlaneBase::poll_timeout_ms(SteadyTime now) const {
  // A few checks per heartbeat interval are exact enough for every limit.
  auto timeout = std::clamp(options_.heartbeat_interval / 4, std::chrono::milliseconds(2),
                            std::chrono::milliseconds(250));
  if (progress_is_new_.load()) {
    const auto due = std::chrono::ceil<std::chrono::milliseconds>(progress_due_ - now);
    timeout = std::clamp(due, std::chrono::milliseconds(0), timeout);
  }
  return static_cast<int>(timeout.count());
}

void ControlPlaneBase::run_thread() {
  std::vector<pollfd> watched;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    watched.assign(1, pollfd{wake_.fd(), POLLIN, 0});
    add_sockets(watched);
    const int timeout = poll_timeout_ms(Clock::now());
    lock.unlock();
    poll(watched.data(), watched.size(), timeout);
    lock.lock();
    wake_.drain();
    const auto now = Clock::now();
    clock_.tick(now);
    if (now >= progress_due_ && progress_is_new_.exchange(false)) {
      progress_due_ = now + progress_interval(world_size_);
      send_progress(progress());
    }
    look_at_position(now);
    serve(watched, clock_.at(now));
    if (failure_.failed() && !failure_.callbacks_ran()) {
      log_first_cause();  // before any waiter can wake, throw, and end the process
      lock.unlock();
      failure_.run_callbacks();
      lock.lock();
    }
  }
}

void ControlPlaneBase::log_first_cause() const {
  if (first_cause_is_ours_ || rank_ == 0) {
    log_error("first cause: " + failure_.get().to_line());
  }
}

}  // namespace ddp::detail
