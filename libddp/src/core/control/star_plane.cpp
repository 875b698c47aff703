// SPDX-License-Identifier: Apache-2.0
#include "core/control/star_plane.hpp"

#include <utility>

#include "core/control/failure/first_failure.hpp"
#include "core/control/wire/control_channel.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/detail/check.hpp"

namespace ddp::detail {
namespace {

// A failing rank waits this long for its message to be sent.
constexpr std::chrono::milliseconds kDeliveryTimeout{1000};
// A waiting exchange calls its caller's `poll` at this interval.
constexpr std::chrono::milliseconds kExchangePoll{100};

void check_root(const char* what, int root, int world_size) {
  if (root < 0 || root >= world_size) {
    throw SettingsError(
        concat("control plane: ", what, " rank ", root, " of a job of ", world_size));
  }
}

}  // namespace

StarPlane::StarPlane(const Membership& membership, const ControlPlaneOptions& options,
                     const MakeLink& make_link)
    : state_(membership, options),
      link_(make_link(state_)),
      service_(state_, *link_),
      loop_(state_.monitor.mutex(), state_.wake, service_) {
  loop_.start();
}

StarPlane::~StarPlane() {
  if (closed_) {
    return;
  }
  try {
    FailureCause cause;
    cause.message = "it left before its peers had ended";
    publish_failure(cause);
    stop();
  } catch (const std::exception& error) {
    log_error(concat("control plane: ", error.what()));
  }
}

void StarPlane::wait_for_all() {
  auto lock = state_.monitor.lock();
  link_->wait_for_all(lock);
}

void StarPlane::stop() {
  if (loop_.is_current_thread()) {
    return;  // a failure callback called exit(): the thread serves nothing any more
  }
  {
    auto lock = state_.monitor.lock();
    if (state_.monitor.failed() && !std::exchange(left_, true)) {
      link_->wait_for_peers_to_leave(lock);  // the cause may still be on its way to them
    }
  }
  loop_.stop();
  auto lock = state_.monitor.lock();
  service_.report_failure(lock);  // if the thread ended before it did
}

std::string StarPlane::broadcast(const std::string& value, int root) {
  check_root("broadcast from", root, world_size());
  return collective(CollectiveKind::Broadcast, static_cast<uint32_t>(root),
                    rank() == root ? value : std::string())
      .at(0);
}

std::vector<std::string> StarPlane::all_gather(const std::string& value) {
  return collective(CollectiveKind::AllGather, 0, value);
}

std::vector<std::string> StarPlane::gather(const std::string& value, int root) {
  check_root("gather to", root, world_size());
  return collective(CollectiveKind::Gather, static_cast<uint32_t>(root), value);
}

void StarPlane::barrier() {
  collective(CollectiveKind::Barrier, 0, {});
}

std::vector<std::string> StarPlane::collective(CollectiveKind kind, uint32_t root,
                                               const std::string& value) {
  if (value.size() > kMaxValueBytes) {
    throw SettingsError(concat("control plane: a value has ", value.size(), " bytes; the limit is ",
                               kMaxValueBytes));
  }
  auto& monitor = state_.monitor;
  monitor.throw_if_failed();
  refuse_while_unwinding(to_string(kind));
  auto lock = monitor.lock();
  DDP_CHECK(!closed_, to_string(kind), " after close()");
  const uint64_t sequence = state_.replies.next_sequence();
  state_.position.add_plane_caller();
  link_->contribute(
      {sequence, kind, root, state_.progress.activity().substr(0, kMaxActivityBytes), value});
  if (kind == CollectiveKind::Gather && rank() != static_cast<int>(root)) {
    return {};
  }
  state_.position.begin_plane_call(sequence);
  // Rank 0 enforces the timeout and names missing ranks. This limit covers a stuck rank 0.
  const auto deadline = monitor.now() + state_.options.collective_timeout + state_.dead_after();
  const bool in_time =
      monitor.wait_until(lock, deadline, [&] { return state_.replies.has_result(sequence); });
  state_.position.end_plane_call();
  if (!in_time) {
    throw PeerLostError(concat("control plane: ", to_string(kind), " was not complete within ",
                               state_.options.collective_timeout.count(), " ms"));
  }
  return state_.replies.take_result(sequence);
}

void StarPlane::set_progress(int64_t step, const std::string& where) {
  state_.progress.set(step, where);
}

void StarPlane::publish_failure(const FailureCause& cause) {
  auto& monitor = state_.monitor;
  auto lock = monitor.lock();
  if (monitor.is_over()) {
    return;
  }
  const auto full = state_.complete(cause);
  link_->send_failure(full);
  if (!loop_.is_current_thread()) {
    monitor.wait_despite_failure(lock, kDeliveryTimeout,
                                 [this] { return link_->failure_was_delivered(); });
  }
  monitor.set_failure(full, /*found_here=*/true);  // without an answer this rank's own cause counts
  state_.wake.notify();
}

int StarPlane::add_failure_callback(std::function<void(const FailureCause&)> callback) {
  return state_.monitor.failure().add_callback(std::move(callback));
}

void StarPlane::remove_failure_callback(int token) {
  state_.monitor.failure().remove_callback(token);
}

void StarPlane::close() {
  if (closed_ || failed()) {
    return;
  }
  collective(CollectiveKind::Close, 0, {});
  auto lock = state_.monitor.lock();
  closed_ = true;
  link_->wait_for_peers_to_leave(lock);
}

std::map<int, std::string> StarPlane::exchange(uint64_t key, int num_ranks,
                                               const std::string& value,
                                               const std::function<void()>& poll) {
  refuse_while_unwinding("an exchange among ranks");
  auto& monitor = state_.monitor;
  auto lock = monitor.lock();
  monitor.throw_if_failed();
  link_->send_exchange(key, static_cast<uint32_t>(num_ranks), value.substr(0, kMaxExchangeBytes));
  while (!monitor.wait_until(lock, monitor.now() + kExchangePoll,
                             [&] { return state_.replies.has_exchanged(key); })) {
    lock.unlock();
    poll();
    lock.lock();
  }
  return state_.replies.take_exchanged(key);
}

void StarPlane::add_probe(Probe probe) {
  const auto lock = state_.monitor.lock();
  state_.position.add_probe(std::move(probe));
}

std::string StarPlane::set_activity(std::string activity) {
  return state_.progress.set_activity(std::move(activity));
}

void StarPlane::outlive_context() {
  {
    const auto lock = state_.monitor.lock();
    state_.position.remove_probes();
  }
  state_.monitor.failure().remove_callbacks();
  set_activity(kAfterCloseActivity);
}

}  // namespace ddp::detail
