// SPDX-License-Identifier: Apache-2.0
#include "ddp/core/stop_signal.hpp"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <vector>

#include "core/exchange_pace.hpp"
#include "core/message_codec.hpp"
#include "core/rank_position.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp {
namespace {

constexpr std::array<int, 3> kSignals = {SIGTERM, SIGUSR1, SIGINT};
constexpr int kProgramItself = -1;

// A handler can only reach globals. 0: no request; else the first signal.
std::atomic<int> requested_by{0};
static_assert(std::atomic<int>::is_always_lock_free, "the handler must not take a lock");

void remember(int signal) {
  int none = 0;
  requested_by.compare_exchange_strong(none, signal);
}

extern "C" void handle_stop_signal(int signal) {
  remember(signal);
  if (signal == SIGINT) {
    const int before = errno;  // the interrupted code still needs it
    constexpr char kText[] =
        "\nddp: stopping at the end of a step; press Ctrl-C again to leave at once\n";
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, kText, sizeof(kText) - 1);
    errno = before;
  }
}

std::string name_of(int signal) {
  switch (signal) {
    case SIGTERM:
      return "received SIGTERM";
    case SIGUSR1:
      return "received SIGUSR1";
    case SIGINT:
      return "received SIGINT";
    default:
      return "requested it";
  }
}

struct StopAnswer {
  int signal = 0;
  int64_t interval = 0;  // calls until the next check; rank 0's counts
  friend auto message_fields(StopAnswer& answer) {
    return std::tie(answer.signal, answer.interval);
  }
};

std::string reason_for(std::size_t rank, int signal) {
  return concat("rank ", rank, " ", name_of(signal));
}

}  // namespace

struct StopSignalHandlers::Previous {
  std::array<struct sigaction, kSignals.size()> actions;
};

StopSignalHandlers::StopSignalHandlers() : previous_(std::make_unique<Previous>()) {
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    struct sigaction action = {};
    action.sa_handler = handle_stop_signal;
    sigemptyset(&action.sa_mask);
    // SA_RESTART: our handler must not cause EINTR in other libraries.
    action.sa_flags = SA_RESTART | (kSignals[i] == SIGINT ? static_cast<int>(SA_RESETHAND) : 0);
    sigaction(kSignals[i], &action, &previous_->actions[i]);
  }
}

StopSignalHandlers::~StopSignalHandlers() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &previous_->actions[i], nullptr);
  }
}

void request_stop() {
  remember(kProgramItself);
}
bool stop_requested() {
  return requested_by.load() != 0;
}
void clear_stop_request() {
  requested_by = 0;
}

class StopSignal::Agreement {
 public:
  Agreement(ControlPlane& control_plane, std::chrono::duration<double> check_interval)
      : control_plane_(control_plane),
        check_interval_(check_interval),
        last_check_(std::chrono::steady_clock::now()) {}
  bool should_stop();
  const std::string& reason() const { return reason_; }

 private:
  int64_t choose_interval(int64_t num_calls) const;

  ControlPlane& control_plane_;
  const std::chrono::duration<double> check_interval_;
  std::chrono::steady_clock::time_point last_check_;
  detail::ExchangePace pace_;
  int64_t calls_since_check_ = 0;
  int64_t calls_until_check_ = 1;  // the first call exchanges: a signal may have arrived earlier
  std::string reason_;
};

// Number of calls that fill the pause at the current pace, at most four times the last number.
// Otherwise one fast stretch (a warm cache, a skipped evaluation) could delay the next exchange too
// long.
int64_t StopSignal::Agreement::choose_interval(int64_t num_calls) const {
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - last_check_;
  const double calls = static_cast<double>(num_calls) * pace_.pause(check_interval_).count() /
                       std::max(elapsed.count(), 1e-9);
  return std::clamp<int64_t>(static_cast<int64_t>(std::min(calls, 1e9)), 1, 4 * num_calls);
}

bool StopSignal::Agreement::should_stop() {
  if (!reason_.empty()) {
    return true;
  }
  const int own = requested_by.load();
  if (control_plane_.world_size() == 1) {
    reason_ = own == 0 ? "" : reason_for(0, own);
    return own != 0;
  }
  if (++calls_since_check_ < calls_until_check_) {
    return false;
  }
  const detail::ActivityScope activity(control_plane_, "stop check");
  const StopAnswer answer{own, choose_interval(calls_since_check_)};
  const auto begin = std::chrono::steady_clock::now();
  const auto answers = detail::all_gather_messages(control_plane_, answer);
  for (std::size_t rank = 0; rank < answers.size(); ++rank) {
    if (answers[rank].signal != 0 && reason_.empty()) {
      reason_ = reason_for(rank, answers[rank].signal);
    }
  }
  calls_until_check_ = answers[0].interval;
  calls_since_check_ = 0;
  last_check_ = std::chrono::steady_clock::now();
  pace_.note(last_check_ - begin);
  if (!reason_.empty() && control_plane_.rank() == 0) {
    log_info(reason_ + ": all ranks stop now");
  }
  return !reason_.empty();
}

StopSignal::StopSignal(ControlPlane& control_plane, std::chrono::duration<double> check_interval)
    : agreement_(std::make_unique<Agreement>(control_plane, check_interval)) {}
StopSignal::~StopSignal() = default;

bool StopSignal::should_stop() {
  return agreement_->should_stop();
}

const std::string& StopSignal::reason() const {
  return agreement_->reason();
}

}  // namespace ddp
