// SPDX-License-Identifier: Apache-2.0
#include "core/control_plane_base.hpp"

#include <algorithm>

#include "core/byte_codec.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {
namespace {

using Clock = std::chrono::steady_clock;

// How long a failing rank waits for its word to arrive before it unwinds.
constexpr std::chrono::milliseconds kDeliveryTimeout{1000};

// Progress is told at most this often, and in large jobs less, so that rank 0 is not kept busy.
std::chrono::microseconds progress_interval(int world_size) {
  return std::max(std::chrono::microseconds(10'000), std::chrono::microseconds(100) * world_size);
}

}  // namespace

const char* to_string(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::Broadcast:
      return "broadcast";
    case CollectiveKind::AllGather:
      return "all_gather";
    case CollectiveKind::Barrier:
      return "barrier";
    case CollectiveKind::Close:
      return "close";
  }
  return "?";
}

std::string encode_contribution(const Contribution& contribution) {
  ByteWriter writer;
  writer.number(contribution.sequence).number(static_cast<uint8_t>(contribution.kind));
  return writer.number(contribution.root).text(contribution.value).take();
}

bool decode_contribution(std::string_view bytes, Contribution& contribution) {
  ByteReader reader(bytes);
  contribution.sequence = reader.number<uint64_t>();
  const auto kind = reader.number<uint8_t>();
  contribution.kind = static_cast<CollectiveKind>(kind);
  contribution.root = reader.number<uint32_t>();
  contribution.value = reader.text();
  return reader.finished() && kind <= static_cast<uint8_t>(CollectiveKind::Close);
}

ControlPlaneBase::ControlPlaneBase(const LaunchEnvironment& launch,
                                   const ControlPlaneOptions& options)
    : rank_(launch.rank),
      world_size_(launch.world_size),
      options_(options),
      host_(host_name()),
      notes_(static_cast<std::size_t>(launch.world_size)) {}

std::string ControlPlaneBase::broadcast(const std::string& value, int root) {
  if (root < 0 || root >= world_size_) {
    throw SettingsError(
        concat("control plane: broadcast from rank ", root, " of a job of ", world_size_));
  }
  static const std::string nothing;
  return collective(CollectiveKind::Broadcast, static_cast<uint32_t>(root),
                    rank_ == root ? value : nothing)
      .at(0);
}

std::vector<std::string> ControlPlaneBase::all_gather(const std::string& value) {
  return collective(CollectiveKind::AllGather, 0, value);
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
  std::unique_lock lock(mutex_);
  if (failure_.failed()) {
    throw_failure(failure_.get());
  }
  DDP_CHECK(!closed_, to_string(kind), " after close()");
  const uint64_t sequence = next_sequence_++;
  contribute({sequence, kind, root, value});
  // Rank 0 watches the time and names who is missing; this limit is for a rank 0 that cannot.
  const auto deadline = Clock::now() + options_.collective_timeout + dead_after();
  const auto complete = [&] {
    const auto found = results_.find(sequence);
    return found != results_.end() && found->second.num_arrived == found->second.values.size();
  };
  if (!wait_until(lock, deadline, complete)) {
    throw PeerLostError(concat("control plane: ", to_string(kind), " was not complete within ",
                               options_.collective_timeout.count(), " ms"));
  }
  auto values = std::move(results_.at(sequence).values);
  results_.erase(sequence);
  return values;
}

void ControlPlaneBase::note_result_part(uint64_t sequence, uint32_t part, uint32_t num_parts,
                                        std::string value) {
  auto& result = results_[sequence];
  result.values.resize(num_parts);
  result.values.at(part) = std::move(value);
  if (++result.num_arrived == num_parts) {
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
  const std::lock_guard lock(mutex_);
  if (step == step_ && where == where_) {
    return;
  }
  step_ = step;
  where_ = where;
  if (!progress_is_new_) {
    progress_is_new_ = true;
    wake_.notify();
  }
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
  if (full.step < 0) {
    full.step = step_;
  }
  if (full.where.empty()) {
    full.where = where_;
  }
  send_failure(full);
  if (std::this_thread::get_id() != thread_.get_id()) {
    changed_.wait_until(lock, Clock::now() + kDeliveryTimeout,
                        [this] { return failure_was_delivered(); });
  }
  if (failure_.set(full)) {  // nobody answered: our own word counts
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

// Nobody serves the connections any more. What the sockets take now is the last that peers hear.
void ControlPlaneBase::end_job_with(const std::string& problem) {
  FailureCause cause;
  cause.rank = rank_;
  cause.host = host_;
  cause.message = problem;
  cause.exit_code = ExitCode::UserException;
  {
    const std::lock_guard lock(mutex_);
    cause.step = step_;
    cause.where = where_;
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
  react_to_failure();
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
  // Every limit is looked at a few times within a heartbeat: none needs to be exact.
  auto timeout = std::clamp(options_.heartbeat_interval / 4, std::chrono::milliseconds(2),
                            std::chrono::milliseconds(250));
  if (progress_is_new_) {
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
    if (progress_is_new_ && now >= progress_due_) {
      progress_is_new_ = false;
      progress_due_ = now + progress_interval(world_size_);
      send_progress();
    }
    serve(now);
    if (failure_.failed() && !failure_.callbacks_ran()) {
      lock.unlock();
      react_to_failure();
      lock.lock();
    }
  }
}

void ControlPlaneBase::react_to_failure() {
  if (first_cause_is_ours_ || rank_ == 0) {
    log_error("first cause: " + failure_.get().to_line());
  }
  failure_.run_callbacks();
}

}  // namespace ddp::detail
