// SPDX-License-Identifier: Apache-2.0
#include "ddp/core/stop_signal.hpp"

#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <functional>
#include <utility>

#include "core/launch/report_signal.hpp"
#include "core/launch/training_state.hpp"
#include "ddp/core/logging.hpp"

namespace ddp {
namespace {

constexpr std::array<int, 4> kSignals = {SIGTERM, SIGUSR1, SIGINT, SIGUSR2};

std::atomic<bool> is_requested{false};  // a handler can only reach globals
std::atomic<bool> report_is_requested{false};
std::atomic<bool> has_state{false};
std::function<void(int64_t)> step_hook;
std::atomic<int64_t> num_training_forwards{0};
std::atomic<int64_t> num_later_steps{0};
static_assert(std::atomic<bool>::is_always_lock_free, "the handler must not take a lock");

extern "C" void handle_stop_signal(int signal) {
  is_requested = true;
  if (signal == SIGINT) {
    const int before = errno;  // the interrupted code still needs it
    constexpr char kText[] =
        "\nddp: stopping at the end of a step; press Ctrl-C again to leave at once\n";
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, kText, sizeof(kText) - 1);
    errno = before;
  }
}

extern "C" void handle_report_signal(int /*signal*/) {
  report_is_requested = true;
}

// Whether the program handles or ignores the signal.
bool is_of_program(const struct sigaction& action) {
  return (static_cast<unsigned>(action.sa_flags) & SA_SIGINFO) != 0 ||
         (action.sa_handler != SIG_DFL && action.sa_handler != handle_report_signal);
}

}  // namespace

struct StopSignalHandlers::Previous {
  std::array<struct sigaction, kSignals.size()> actions;
};

StopSignalHandlers::StopSignalHandlers() : previous_(std::make_unique<Previous>()) {
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    struct sigaction action = {};
    action.sa_handler = kSignals[i] == SIGUSR2 ? handle_report_signal : handle_stop_signal;
    sigemptyset(&action.sa_mask);
    // SA_RESTART: our handler must not cause EINTR in other libraries.
    action.sa_flags = SA_RESTART | (kSignals[i] == SIGINT ? static_cast<int>(SA_RESETHAND) : 0);
    auto& previous = previous_->actions[i];
    sigaction(kSignals[i], nullptr, &previous);
    if (kSignals[i] == SIGUSR2 && is_of_program(previous)) {
      log_warning(
          "this process has its own handler of SIGUSR2, so the signal asks for no report of all "
          "ranks; fix: use another signal in the program (docs/recipes/hang.md)");
      continue;
    }
    sigaction(kSignals[i], &action, nullptr);
  }
}

StopSignalHandlers::~StopSignalHandlers() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &previous_->actions[i], nullptr);
  }
}

void request_stop() {
  is_requested = true;
}
bool stop_requested() {
  detail::record_training_state();
  return is_requested;
}
void clear_stop_request() {
  is_requested = false;
  has_state = false;
}

bool detail::take_report_request() {
  return report_is_requested.exchange(false);
}

void detail::record_training_state() {
  has_state.store(true, std::memory_order_relaxed);
}
void detail::set_step_hook(std::function<void(int64_t step)> hook) {
  step_hook = std::move(hook);
}
void detail::report_step(int64_t step) {
  if (step != kEvaluationForward) {
    record_training_state();
  }
  if (step == kTrainingForward) {
    num_training_forwards.fetch_add(1, std::memory_order_relaxed);
  }
  if (step_hook) {
    step_hook(step);
  }
}
bool detail::has_training_state() {
  return has_state.load(std::memory_order_relaxed);
}
void detail::record_later_step() {
  num_later_steps.fetch_add(1, std::memory_order_relaxed);
}
detail::TrainingWatch::TrainingWatch()
    : forwards_at_start_(num_training_forwards), later_steps_at_start_(num_later_steps) {}
int64_t detail::TrainingWatch::step_of(int64_t announced) const {
  const bool has_begun =
      num_training_forwards.load(std::memory_order_relaxed) != forwards_at_start_;
  return announced < 0 && has_begun ? kUnknownStep : announced;
}
bool detail::TrainingWatch::has_ended_first_step() const {
  return num_later_steps.load(std::memory_order_relaxed) != later_steps_at_start_;
}
bool detail::is_stop_requested() {
  return is_requested;
}

}  // namespace ddp
