// SPDX-License-Identifier: Apache-2.0
#include "core/control/hub/control_hub.hpp"

#include <unistd.h>

#include <utility>

#include "core/control/wire/message_codec.hpp"
#include "core/files/file_ops.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {
namespace {

using Clock = std::chrono::steady_clock;

// After a failed rendezvous rank 0 stays this long to notify late ranks.
constexpr std::chrono::seconds kFarewell{1};
// After close() or a failure rank 0 waits this long for its peers to leave first.
constexpr std::chrono::seconds kLeaveTimeout{2};
// A waiting rank is reported after this many heartbeats, once per wait.
constexpr int kReportAfterHeartbeats = 6;

// A requested report does not count shorter waits: ranks of a running job always wait a little.
constexpr std::chrono::milliseconds kMinReportedWait{1000};

// A rank that does not answer and was silent for so long is stopped, or its link is down.
constexpr int kSilentHeartbeats = 2;

// The state of a process on this host as /proc shows it: 'T' stopped, 't' traced. 0 if not known.
char process_state(uint32_t process) {
  const auto text = kernel_text(concat("/proc/", process, "/stat"));
  const auto name_end = text.rfind(") ");
  return name_end == std::string::npos || name_end + 2 >= text.size() ? '\0' : text[name_end + 2];
}

// `use` returns why the message is invalid, or an empty string.
template <typename T, typename Use>
std::string use_message(const Frame& frame, const Use& use) {
  auto message = try_decode_message<T>(frame.payload);
  return message ? use(*std::move(message)) : describe_invalid(frame);
}

}  // namespace

ControlHub::ControlHub(RankState& state, Listener listener, std::string secret, uint64_t generation)
    : state_(state),
      generation_(generation),
      rendezvous_deadline_(Clock::now() + state.options.rendezvous_timeout),
      peers_(state),
      acceptor_(std::move(listener), std::move(secret),
                newcomer_limit(state.membership.world_size)),
      rounds_(peers_, state.options.collective_timeout),
      waits_(peers_, state.options.heartbeat_interval * kReportAfterHeartbeats),
      exchanges_(state.membership) {}

void ControlHub::wait_for_all(JobMonitor::Lock& lock) {
  // The background thread ends the wait: either all ranks joined or the rendezvous failed.
  state_.monitor.wait(lock, [this] { return complete_; });
  if (state_.monitor.first_cause().exit_code == ExitCode::Settings) {  // late ranks receive it too
    state_.monitor.wait_despite_failure(
        lock, kFarewell, [this] { return peers_.all_joined() && failure_was_delivered(); });
  }
  state_.monitor.throw_if_failed();
}

void ControlHub::add_sockets(std::vector<pollfd>& watched) {
  acceptor_.add_sockets(watched, state_.monitor.now());
  peers_.add_sockets(watched);
}

void ControlHub::serve(const std::vector<pollfd>& watched, SteadyTime now) {
  acceptor_.serve(now, [&](const Hello& hello, ControlChannel channel) {
    admit(hello, std::move(channel), now);
  });
  for (int rank = 1; rank < state_.membership.world_size; ++rank) {
    if (const auto ready = peers_.events(rank, watched); ready != 0) {
      serve_peer(rank, (ready & ~POLLOUT) != 0, now);
    }
  }
  acceptor_.flush_refused(now);
  if (const auto steady = Clock::now(); steady >= next_heartbeat_) {
    next_heartbeat_ = steady + state_.options.heartbeat_interval;
    peers_.broadcast(FrameType::Heartbeat, {});
  }
  check_limits(now);
  const auto is_expected = [&](int rank) { return peers_.is_connected(rank); };
  if (reports_.is_complete(peers_.size(), Clock::now(), is_expected)) {
    ready_report_ = make_report(now);
  }
  if (state_.monitor.is_over()) {
    state_.monitor.notify();
  }
}

void ControlHub::admit(const Hello& hello, ControlChannel channel, SteadyTime now) {
  if (hello.generation != generation_) {
    acceptor_.refuse(
        std::move(channel),
        concat("this process belongs to another job, or to another start or generation of the "
               "job, than rank 0 (",
               state_.host, ":", getpid(),
               "), which listens at this port; give every job its own port (MASTER_PORT)"),
        now);
    return;
  }
  if (const auto reason = peers_.why_refused(hello); !reason.empty()) {
    acceptor_.refuse(std::move(channel), reason, now);
    if (!complete_ && !state_.monitor.failed()) {  // a running job ignores late joiners
      fail_job(ExitCode::Settings, reason);
    }
    return;
  }
  peers_.add(hello, std::move(channel), now);
  acceptor_.clear_problem();
  const auto rank = static_cast<int>(hello.rank);
  peers_.send(rank, FrameType::Heartbeat, {});  // proves the acceptance
  if (state_.monitor.failed()) {
    peers_.send(rank, FrameType::Failure, encode_cause(state_.monitor.first_cause()));
  } else if (peers_.all_joined()) {
    complete_ = true;
    state_.membership.hosts = peers_.hosts();
    peers_.broadcast(FrameType::Welcome, encode_message(Welcome{state_.membership.hosts}));
    state_.monitor.notify();
  }
}

void ControlHub::serve_peer(int rank, bool readable, SteadyTime now) {
  std::vector<Frame> frames;
  const IoStatus status = readable ? peers_.receive(rank, now, frames) : IoStatus::WouldBlock;
  for (const auto& frame : frames) {
    if (const auto reason = handle(rank, frame); !reason.empty()) {
      declare_lost(rank, concat("it ", reason, ", which libddp never does"));
      return;
    }
  }
  if (status == IoStatus::Closed) {
    declare_lost(rank, peers_.why_closed(rank));
  } else {
    peers_.flush(rank);
  }
}

// The first message that no rank of this library sends ends the job, so nothing that a rank sends
// makes this process store more than the limits of the messages.
std::string ControlHub::handle(int rank, const Frame& frame) {
  const auto add_to = [&](const auto& rounds, auto& message, auto record) {
    auto reason = rounds.why_invalid(rank, message);
    if (reason.empty()) {
      (this->*record)(rank, std::move(message));
    }
    return reason;
  };
  switch (frame.type) {
    case FrameType::Heartbeat:
      return {};
    case FrameType::Progress:
      return use_message<Progress>(frame, [&](Progress progress) {
        peers_.set_progress(rank, std::move(progress));
        return std::string();
      });
    case FrameType::Position:
      return use_message<RankPosition>(frame, [&](RankPosition position) {
        waits_.set_position(rank, std::move(position), state_.monitor.now());
        return std::string();
      });
    case FrameType::Contribution:
      return use_message<Contribution>(frame, [&](Contribution contribution) {
        return add_to(rounds_, contribution, &ControlHub::record_contribution);
      });
    case FrameType::Exchange:
      return use_message<ExchangeValue>(frame, [&](ExchangeValue value) {
        return add_to(exchanges_, value, &ControlHub::record_exchange);
      });
    case FrameType::Failure:
      return use_message<FailureCause>(
          frame, [&](const FailureCause& cause) { return record_failure(cause); });
    case FrameType::ReportRequest:
      if (frame.payload.empty()) {
        request_report();
        return {};
      }
      break;
    case FrameType::Report:
      return use_message<RankReport>(frame, [&](RankReport report) {
        reports_.add(rank, std::move(report));
        return std::string();
      });
    case FrameType::Welcome:
    case FrameType::Result:
    case FrameType::Exchanged:
      break;  // only rank 0 sends them
  }
  return describe_invalid(frame);
}

// A rank may name another one, which all ranks found to be the cause.
std::string ControlHub::record_failure(const FailureCause& cause) {
  if (cause.rank < 0 || cause.rank >= state_.membership.world_size) {
    return concat("reported a failure of rank ", cause.rank, " in a job of ",
                  state_.membership.world_size);
  }
  if (!state_.monitor.failed()) {
    send_failure(cause);
  }
  return {};
}

void ControlHub::contribute(Contribution contribution) {
  record_contribution(0, std::move(contribution));
}

void ControlHub::record_contribution(int rank, Contribution contribution) {
  auto outcome = rounds_.add(rank, std::move(contribution), state_.monitor.now());
  if (!outcome.mismatch.empty()) {
    fail_job(ExitCode::Mismatch, outcome.mismatch);
  } else if (outcome.result) {
    send_result(std::move(*outcome.result));
  }
}

// Sends the values to all ranks; those of a gather only to the root.
void ControlHub::send_result(CollectiveRounds::Result result) {
  if (result.kind == CollectiveKind::Close) {
    state_.monitor.set_closing();
  }
  const bool to_all = result.kind != CollectiveKind::Gather;
  if (to_all || result.root != 0) {
    for (const auto& message : encode_result(result.sequence, result.values)) {
      to_all ? peers_.broadcast(FrameType::Result, message)
             : peers_.send(static_cast<int>(result.root), FrameType::Result, message);
    }
  }
  if (to_all || result.root == 0) {
    ResultPart own;
    own.sequence = result.sequence;
    own.num_values = static_cast<uint32_t>(result.values.size());
    own.values = std::move(result.values);
    if (state_.replies.add_result(std::move(own))) {
      state_.monitor.notify();
    }
  }
}

void ControlHub::send_position(const RankPosition& position) {
  waits_.set_position(0, position, state_.monitor.now());
}

void ControlHub::send_exchange(uint64_t key, uint32_t num_ranks, const std::string& value) {
  record_exchange(0, {key, num_ranks, value});
}

void ControlHub::record_exchange(int rank, ExchangeValue value) {
  auto result = exchanges_.add(rank, std::move(value));
  if (!result) {
    return;
  }
  const auto payload = encode_message(*result);
  for (const auto& entry : result->values) {
    peers_.send(entry.first, FrameType::Exchanged, payload);
  }
  if (result->values.contains(0)) {
    state_.replies.add_exchanged(result->key, std::move(result->values));
    state_.monitor.notify();
  }
}

// Adds what the other ranks did if the failing rank waited: it knows only that it waited.
void ControlHub::send_failure(const FailureCause& cause) {
  auto full = cause;
  if (cause.rank >= 0 && cause.rank < state_.membership.world_size && waits_.waits(cause.rank)) {
    if (const auto busy = waits_.describe_busy({cause.rank}); !busy.empty()) {
      full.message += "; meanwhile " + busy;
    }
  }
  fail(full);
}

void ControlHub::fail(const FailureCause& cause) {
  if (state_.monitor.set_failure(cause, /*found_here=*/true)) {
    // Before its communicators abort. The other ranks answer the cause with theirs.
    begin_report();
    peers_.broadcast(FrameType::Failure, encode_cause(cause));
  }
}

void ControlHub::request_report() {
  if (complete_ && !state_.monitor.is_over() && reports_.may_begin(Clock::now())) {
    begin_report();
    peers_.broadcast(FrameType::ReportRequest, {});
  }
}

std::optional<JobReport> ControlHub::take_report() {
  if (ready_report_) {
    state_.monitor.notify();  // wait_for_peers_to_leave()
  }
  return std::exchange(ready_report_, {});
}

void ControlHub::begin_report() {
  if (complete_) {
    reports_.begin(Clock::now());
    reports_.add(0, state_.position.report());
  }
}

JobReport ControlHub::make_report(SteadyTime now) {
  auto answers = reports_.take(Clock::now());
  JobReport report;
  for (int rank = 0; rank < peers_.size(); ++rank) {
    auto& evidence = report.evidence.emplace_back();
    evidence.host = peers_.host(rank);
    evidence.process = peers_.process(rank);
    evidence.last = peers_.progress(rank);
    evidence.silence = peers_.silence(rank, now);
    evidence.waited = waits_.waited(rank, now);
    evidence.call = rounds_.pending_call(rank);
    evidence.num_calls = rounds_.num_calls(rank);
    if (const auto answer = answers.find(rank); answer != answers.end()) {
      evidence.report = std::move(answer->second);
    } else if (evidence.host == state_.host) {
      evidence.process_state = process_state(evidence.process);
    }
    // Ranks of a failed job close their connections once they have answered.
    evidence.is_connected = peers_.is_connected(rank) || evidence.report.has_value();
  }
  if (state_.monitor.failed()) {
    report.cause = state_.monitor.first_cause();
  }
  if (was_stopped_) {  // the others have ended, and nothing is known of them
    report.verdict = {.kind = VerdictKind::Stopped,
                      .ranks = {state_.membership.rank},
                      .text = report.cause->to_line()};
    return report;
  }
  report.verdict = diagnose(
      report.evidence, {.min_wait = report.cause ? std::chrono::milliseconds(0) : kMinReportedWait,
                        .min_silence = state_.options.heartbeat_interval * kSilentHeartbeats});
  return report;
}

void ControlHub::fail_job(ExitCode code, const std::string& message) {
  FailureCause cause;  // of no single rank
  cause.message = message;
  cause.exit_code = code;
  fail(cause);
}

void ControlHub::declare_lost(int rank, const std::string& why) {
  peers_.disconnect(rank);
  if (state_.monitor.is_over()) {
    return;
  }
  FailureCause cause;
  cause.rank = rank;
  cause.host = peers_.host(rank);
  const auto reached = peers_.progress(rank);
  cause.step = reached.step;
  cause.where = reached.where;
  cause.message = why;
  cause = state_.cause_of_loss(cause);
  was_stopped_ = cause.rank == state_.membership.rank;
  fail(cause);
}

void ControlHub::check_limits(SteadyTime now) {
  if (state_.monitor.is_over()) {
    return;
  }
  if (const auto deadlock = waits_.find_new_deadlock(rounds_); !deadlock.empty()) {
    fail_job(ExitCode::Mismatch, deadlock);
  }
  if (const auto warning = waits_.report_long_waits(now); !warning.empty()) {
    log_warning(warning);
  }
  if (const auto silent = peers_.find_silent(now, state_.dead_after())) {
    declare_lost(*silent, concat("no sign of life for ", state_.dead_after().count(),
                                 " ms (frozen, or its host or network is down)"));
    return;
  }
  // More than the results of a collective whose values all have the greatest size.
  const auto most_unsent =
      static_cast<std::size_t>(state_.membership.world_size + 64) * kMaxPayloadBytes;
  if (const auto deaf = peers_.find_deaf(most_unsent)) {
    declare_lost(*deaf, concat("it does not read its messages: more than ", most_unsent,
                               " bytes could not be sent"));
    return;
  }
  if (!complete_ && now >= rendezvous_deadline_) {
    fail_job(
        ExitCode::PeerLost,
        concat("rendezvous: ", peers_.num_joined(), " of ", state_.membership.world_size,
               " ranks joined within ", state_.options.rendezvous_timeout.count(),
               " ms; missing: ", list_ranks(peers_.missing()),
               acceptor_.problem().empty() ? "" : "; rank 0 could not accept their connections: ",
               acceptor_.problem(),
               "; fix: see what those ranks printed, or raise "
               "context.control_plane.rendezvous_timeout_ms"));
    return;
  }
  if (const auto overdue = rounds_.find_overdue(now); !overdue.empty()) {
    fail_job(ExitCode::PeerLost, overdue);
  }
}

void ControlHub::wait_for_peers_to_leave(JobMonitor::Lock& lock) {
  // If rank 0 closed first, a peer could lose data that it has not read yet.
  state_.monitor.wait_despite_failure(lock, kLeaveTimeout, [this] {
    return !peers_.any_connected() && !reports_.is_open() && !ready_report_;
  });
}

}  // namespace ddp::detail
