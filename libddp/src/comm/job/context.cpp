// SPDX-License-Identifier: Apache-2.0
#include "ddp/comm/context.hpp"

#include <ATen/Context.h>
#include <torch/utils.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "comm/job/context_handle.hpp"
#include "comm/job/create_communicator.hpp"
#include "comm/job/cuda_device.hpp"
#include "comm/job/meeting.hpp"
#include "comm/mpi/mpi_runtime.hpp"
#include "comm/tuning/algorithm_choices.hpp"
#include "comm/tuning/group_choices.hpp"
#include "core/control/failure/exit_actions.hpp"
#include "core/control/failure/failure_policy.hpp"
#include "core/control/failure/first_failure.hpp"
#include "core/control/plane_interfaces.hpp"
#include "core/control/rank_position.hpp"
#include "core/control/wire/message_codec.hpp"
#include "core/files/plan_file.hpp"
#include "core/launch/training_state.hpp"
#include "core/log/error_text.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/detail/check.hpp"

namespace ddp {

// Members are in construction order; close() destroys them in reverse.
struct Context::State {
  detail::Meeting meeting;
  std::shared_ptr<ControlPlane> control_plane;
  CommunicatorPtr communicator;
  std::vector<std::function<void()>> teardowns;
  std::string plan_file;
  int64_t plan_version = 0;  // version stored in the file
  std::optional<FailureCause> deferred_failure;
  int exceptions_at_start = std::uncaught_exceptions();
  const pid_t pid = getpid();
  std::atomic<bool> is_ending{false}, has_ended{false};

  struct AtExit;
  std::shared_ptr<AtExit> at_exit;

  State() = default;
  ~State();
  /// Connects the ranks of `meeting`. Collective.
  static std::unique_ptr<State> connect(const ContextOptions& options, detail::Meeting meeting);
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  /// True for the first caller, which ends the context. A thread may call exit() at any time.
  bool begin_end() { return !is_ending.exchange(true); }
  /// From here on exit() ends the context.
  void watch_exit();
  /// `meets_again`: some ranks go on as the next generation.
  void close(bool meets_again = false);
  void throw_deferred_failure() const;
  void read_plan();
  void write_plan();
  void run_teardowns();
  /// Returns true if the control plane must stay open until MPI ends with the process.
  bool leave(bool meets_again);
  void abandon(const std::string& reason);
};

// Ends a context when the program exits while it is open: on the stack of a thread, or in a static
// object that is destroyed too late.
struct Context::State::AtExit {
  std::mutex mutex;
  State* state;  // null once destroyed
  std::weak_ptr<ControlPlane> control_plane;

  void end(int status);
  void leave(ControlPlane& plane, int status, bool is_first);
};

Context Context::create(const ContextOptions& options) {
  return Context(State::connect(options, detail::first_meeting(options)));
}

std::unique_ptr<Context::State> Context::State::connect(const ContextOptions& options,
                                                        detail::Meeting meeting) {
  auto state = std::make_unique<State>();
  state->meeting = std::move(meeting);
  auto& [launch, membership, mpi, rendezvous, device] = state->meeting;
  auto& plane = state->control_plane;
  plane = detail::create_control_plane(launch, membership, std::move(rendezvous),
                                       options.control_plane);
  // From here on a failure is reported to the peers, by ~State at the latest.
  try {
    membership = plane->membership();
    detail::place_on_host(options, membership, launch);
    device = detail::choose_device(options, state->meeting, *plane);
    if (device->is_cuda()) {
      detail::use_gpu(*device);
    }
    torch::manual_seed(static_cast<uint64_t>(options.seed));
    state->communicator =
        detail::create_communicator(launch, plane, *device, options.communicator, mpi);
    state->plan_file = options.plan_file;
    state->read_plan();
    state->watch_exit();
  } catch (const std::exception& error) {
    FailureCause cause;
    cause.where = "start";
    cause.message = detail::message_of(error);
    cause.exit_code = detail::exit_code_of(error);
    plane->publish_failure(cause);
    state->abandon(cause.message);
    throw;
  }
  return state;
}

// Rank 0's setting counts, because rank 0 owns the file.
void Context::State::read_plan() {
  const auto text = control_plane->broadcast(meeting.membership.rank == 0 && !plan_file.empty()
                                                 ? read_plan_file(plan_file)
                                                 : std::string());
  if (!text.empty()) {
    communicator->choices().adopt(text, plan_file.empty() ? "rank 0's plan file" : plan_file);
    plan_version = communicator->choices().plan().version();
  }
}

void Context::State::write_plan() {
  if (meeting.membership.rank != 0 || plan_file.empty()) {
    return;
  }
  detail::save_algorithm_choices(communicator->choices().plan());
  if (communicator->choices().plan().version() == plan_version) {
    return;
  }
  try {
    write_plan_file(plan_file, communicator->choices().plan());
  } catch (const WriteError& error) {
    // The run loses nothing: the next run measures again.
    log_warning(concat("context.plan_file=", plan_file, ": ", error.what()));
  }
}

void Context::State::run_teardowns() {
  while (!teardowns.empty()) {
    const auto teardown = std::move(teardowns.back());
    teardowns.pop_back();
    teardown();
  }
}

bool Context::State::leave(bool meets_again) {
  const detail::ActivityScope activity(*control_plane, detail::kCloseActivity);
  // Rank 0 decides for all. After this broadcast all ranks' collectives are done, so a backend may
  // end in any way.
  const auto& mpi = meeting.mpi;
  const bool ends_mpi = !meets_again && mpi != nullptr && mpi->ends_mpi();
  const std::string keep = ends_mpi ? "keep" : "close";
  const bool keeps_plane = control_plane->broadcast(keep) == "keep";
  if (communicator.use_count() > 1) {
    communicator->abort("the context was closed");
  }
  communicator.reset();
  if (mpi != nullptr) {
    // The control plane closes after MPI, to detect a lost rank until then.
    control_plane->add_failure_callback(
        [mpi = mpi](const FailureCause& cause) { mpi->abandon(cause.to_line()); });
    mpi->finalize();
  }
  if (!keeps_plane) {
    control_plane->close();
  }
  if (control_plane->failed()) {
    detail::throw_failure(control_plane->failure());
  }
  return keeps_plane;
}

// Peers may be lost, so this calls nothing that waits for them.
void Context::State::abandon(const std::string& reason) {
  if (communicator != nullptr) {
    communicator->abort(reason);
  }
  run_teardowns();
  communicator.reset();
  if (meeting.mpi != nullptr) {
    meeting.mpi->abandon(reason);
  }
  control_plane.reset();
  has_ended = true;
}

Context::Context(std::unique_ptr<State> state) : state_(std::move(state)) {}
Context::Context(Context&&) noexcept = default;

Context& Context::operator=(Context&& other) noexcept {
  std::swap(state_, other.state_);
  return *this;
}

Context::~Context() {
  if (state_ == nullptr) {
    return;
  }
  if (getpid() != state_->pid) {
    static_cast<void>(state_.release());  // a child of fork() has none of its threads
    return;
  }
  if (!state_->begin_end()) {
    return;
  }
  try {
    auto& plane = *state_->control_plane;
    const bool unwinding = std::uncaught_exceptions() > state_->exceptions_at_start;
    if (unwinding && state_->meeting.membership.world_size > 1) {
      FailureCause cause;  // the message is not readable during unwinding
      cause.message = "an exception that nobody published ended this rank";
      cause.exit_code = ExitCode::UserException;
      plane.publish_failure(cause);
    }
    if (unwinding || plane.failed()) {
      state_->abandon(plane.failed() ? plane.failure().to_line() : "an exception ended this rank");
    } else {
      state_->close();
    }
  } catch (const std::exception& error) {
    log_error(concat("while closing: ", detail::message_of(error)));
  }
}

void detail::ContextHandle::defer_failure(const FailureCause& cause) const {
  if (!state_->deferred_failure) {
    state_->deferred_failure = cause;
  }
}

void detail::ContextHandle::throw_deferred_failure() const {
  state_->throw_deferred_failure();
}

void Context::State::throw_deferred_failure() const {
  if (deferred_failure) {
    control_plane->publish_failure(*deferred_failure);
    detail::throw_failure(*deferred_failure);
  }
}

void Context::close() {
  if (state_->begin_end()) {
    state_->close();
  }
}

void Context::State::close(bool meets_again) {
  try {
    throw_deferred_failure();
    run_teardowns();
    write_plan();
    if (leave(meets_again)) {
      meeting.mpi->keep_open_until_end(std::move(control_plane));
    }
    control_plane.reset();
    has_ended = true;
  } catch (const std::exception& error) {
    abandon(detail::message_of(error));
    throw;
  }
}

Context::State::~State() {
  if (at_exit != nullptr) {
    const std::lock_guard lock(at_exit->mutex);
    at_exit->state = nullptr;
  }
}

// The control plane has signed messages and MPI has started, so the ends of OpenSSL and MPI are
// registered already and run after this.
void Context::State::watch_exit() {
  at_exit = std::make_shared<AtExit>();
  at_exit->state = this;
  at_exit->control_plane = control_plane;
  detail::at_exit([shared = at_exit](int status) { shared->end(status); });
}

void Context::State::AtExit::end(int status) {
  const std::lock_guard lock(mutex);
  const auto plane = control_plane.lock();
  if (state == nullptr || plane == nullptr || state->has_ended) {
    return;
  }
  const bool is_first = state->begin_end();  // otherwise a teardown or another thread calls exit()
  if (!is_first || status != 0 || plane->failed()) {
    leave(*plane, status, is_first);
    return;
  }
  try {
    state->close();
  } catch (const std::exception& error) {
    log_error(concat("while closing: ", detail::message_of(error)));
    detail::replace_success(detail::exit_code_of(error));
  }
}

// Destroys nothing: threads of the program may use the communicator and the control plane, whose
// calls throw from now on.
void Context::State::AtExit::leave(ControlPlane& plane, int status, bool is_first) {
  FailureCause cause;
  cause.message = concat("the program called exit(", status, ") while its context was open");
  if ((status & 0xff) != 0) {
    cause.exit_code = static_cast<ExitCode>(status & 0xff);
  }
  if (plane.world_size() > 1) {
    plane.publish_failure(cause);
  }
  const auto reason = plane.failed() ? plane.failure().to_line() : cause.message;
  if (is_first) {
    state->communicator->abort(reason);
    if (state->meeting.mpi != nullptr) {
      state->meeting.mpi->abandon(reason);
    }
  }
  if (auto* service = plane.background_service()) {
    service->stop();
  }
  if (const auto end = detail::job_end_of(plane)) {
    detail::replace_success(end->exit_code);
  }
}

const Membership& Context::membership() const {
  return state_->meeting.membership;
}
int Context::rank() const {
  return membership().rank;
}
int Context::world_size() const {
  return membership().world_size;
}
int Context::local_rank() const {
  return state_->meeting.launch.local_rank;
}
int Context::local_world_size() const {
  return state_->meeting.launch.local_world_size;
}
int Context::node_rank() const {
  return state_->meeting.launch.node_rank;
}
int Context::num_nodes() const {
  return state_->meeting.launch.num_nodes;
}
at::Device Context::device() const {
  return *state_->meeting.device;
}
const char* Context::launcher() const {
  return to_string(state_->meeting.launch.source);
}
const LaunchEnvironment& Context::launch() const {
  return state_->meeting.launch;
}
CommunicatorPtr Context::communicator() const {
  return state_->communicator;
}

ControlPlane& Context::control_plane() const {
  DDP_CHECK(state_->control_plane != nullptr, "the context was closed");
  return *state_->control_plane;
}

std::optional<Context> detail::ContextHandle::meet_again(const ContextOptions& options,
                                                         bool stays) const {
  auto& state = *state_;
  DDP_CHECK(state.control_plane != nullptr && state.begin_end(), "the context was closed");
  const auto stay = all_gather_messages(*state.control_plane, stays);
  std::vector<int> staying;
  for (std::size_t rank = 0; rank < stay.size(); ++rank) {
    if (stay[rank]) {
      staying.push_back(static_cast<int>(rank));
    }
  }
  state.close(/*meets_again=*/!staying.empty());
  if (!stays) {
    return std::nullopt;
  }
  return Context(Context::State::connect(options, next_meeting(options, state.meeting, staying)));
}

void detail::ContextHandle::set_progress(int64_t step, const std::string& where) const {
  if (step >= 0) {
    detail::report_step(step);
  }
  DDP_CHECK(state_->control_plane != nullptr, "the context was closed");
  state_->control_plane->set_progress(step, where);
  if (step >= 0) {
    state_->communicator->set_step(step);
  }
}

void Context::set_progress(int64_t step, const std::string& where) const {
  detail::ContextHandle(*this).set_progress(step, where);
}

void Context::add_teardown(std::function<void()> teardown) {
  state_->teardowns.push_back(std::move(teardown));
}

}  // namespace ddp
