// SPDX-License-Identifier: Apache-2.0
#include "ddp/comm/context.hpp"

#include <ATen/Context.h>
#include <fcntl.h>
#include <torch/utils.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "comm/algorithm_choices.hpp"
#include "comm/context_handle.hpp"
#include "comm/create_communicator.hpp"
#include "comm/cuda_device.hpp"
#include "comm/device_choice.hpp"
#include "comm/group_choices.hpp"
#include "comm/job_rendezvous.hpp"
#include "comm/mpi_runtime.hpp"
#include "core/detect_launch.hpp"
#include "core/first_failure.hpp"
#include "core/message_codec.hpp"
#include "core/plan_file.hpp"
#include "core/rank_position.hpp"
#include "core/tcp_socket.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/detail/check.hpp"

namespace ddp {

// Members are in construction order; close() destroys them in reverse.
struct Context::State {
  LaunchEnvironment launch;
  std::shared_ptr<detail::MpiRuntime> mpi;
  std::shared_ptr<ControlPlane> control_plane;
  at::Device device = at::kCPU;
  CommunicatorPtr communicator;
  std::vector<std::function<void()>> teardowns;
  std::function<void(int64_t)> before_step;
  std::string plan_file;
  int64_t plan_version = 0;  // version stored in the file
  std::optional<FailureCause> deferred_failure;
  int exceptions_at_start = std::uncaught_exceptions();
  bool closed = false;

  void read_plan();
  void write_plan();
  void run_teardowns();
  /// Returns true if the control plane must stay open until MPI ends with the process.
  bool leave();
  void abandon(const std::string& reason);
};

namespace {

void complete_from_mpi(const detail::MpiRuntime& mpi, LaunchEnvironment& launch) {
  if (launch.world_size == 0) {  // PMIx gives the rank only
    launch.rank = mpi.rank();
    launch.world_size = mpi.world_size();
  }
}

// Records which processes reached MPI_Init, which returns on no rank before all have called it.
// Each process leaves an empty file in a folder of this job and host, which its launcher removes at
// the job's end. Without such a folder nothing is recorded.
class StartedProcesses {
 public:
  StartedProcesses(const LaunchEnvironment& launch, const EnvironmentLookup& environment)
      : launch_(launch) {
    // Set by Open MPI, and by Slurm with PMIx. One launcher may run several jobs, one namespace
    // each.
    const auto folder = environment("PMIX_SERVER_TMPDIR").value_or("");
    const auto name = environment("PMIX_NAMESPACE").value_or("");
    if (folder.empty() || name.empty() || name.find('/') != std::string::npos ||
        launch.local_world_size <= 1) {
      return;
    }
    prefix_ = concat(folder, "/ddp_start_", name, "_");
    const detail::UniqueFd fd(open(concat(prefix_, launch.local_rank).c_str(),
                                   O_CREAT | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!fd.valid()) {
      prefix_.clear();
    }
  }

  // "; missing: rank 1, 3" if the whole job is on this host, else the missing ranks of this host.
  // Empty if nothing is recorded.
  std::string describe_missing() const {
    if (prefix_.empty()) {
      return {};
    }
    const bool one_host = launch_.local_world_size == launch_.world_size;
    std::string missing;
    for (int rank = 0; rank < launch_.local_world_size; ++rank) {
      if (access(concat(prefix_, rank).c_str(), F_OK) != 0) {
        missing += concat(missing.empty() ? "" : ", ", rank);
      }
    }
    if (missing.empty()) {
      return one_host ? "; every rank has begun it"
                      : concat("; every rank of ", detail::host_name(), " has begun it");
    }
    return one_host ? "; missing: rank " + missing
                    : concat("; missing of ", detail::host_name(), ": local rank ", missing);
  }

 private:
  const LaunchEnvironment& launch_;
  std::string prefix_;  // path prefix of the files; empty: nothing is recorded
};

std::shared_ptr<detail::MpiRuntime> initialize_mpi(const LaunchEnvironment& launch,
                                                   const EnvironmentLookup& environment,
                                                   std::chrono::milliseconds timeout) {
  const StartedProcesses started(launch, environment);
  try {
    return detail::MpiRuntime::create(timeout);
  } catch (const PeerLostError& error) {
    throw PeerLostError(error.what() + started.describe_missing());
  }
}

// Finds which ranks share a host if the launcher did not set it. mpirun sets local ranks but no
// node information.
void place_on_host(const ContextOptions& options, ControlPlane& control_plane,
                   LaunchEnvironment& launch) {
  const bool is_known = launch.source == LaunchSource::OpenMpi ||
                        launch.source == LaunchSource::Slurm || launch.local_world_size > 1 ||
                        options.launch.local_rank.has_value();
  const auto hosts = control_plane.all_gather(detail::host_name());
  if (launch.world_size == 1 || (is_known && launch.source != LaunchSource::OpenMpi)) {
    return;
  }
  const auto place = detail::count_local_place(hosts, launch.rank);
  if (!is_known) {
    launch.local_rank = place.local_rank;
    launch.local_world_size = place.local_world_size;
  }
  launch.node_rank = place.node_rank;
  launch.num_nodes = place.num_nodes;
}

at::Device choose_device(bool cuda, int visible_gpus, ControlPlane& control_plane,
                         const LaunchEnvironment& launch) {
  detail::DeviceReport report{detail::host_name(), {}, {}};
  at::Device device = at::kCPU;
  std::exception_ptr problem;
  if (cuda) {
    try {
      const int index =
          detail::choose_gpu(launch.local_rank, launch.local_world_size, visible_gpus, report.host);
      device = at::Device(at::kCUDA, static_cast<at::DeviceIndex>(index));
      detail::identify_gpu(index, report);
    } catch (const Error&) {
      problem = std::current_exception();
      report.gpu = "none";
    }
  }
  // Compared before NCCL starts, which reports only "invalid usage" if two ranks share a GPU.
  const auto reports = detail::all_gather_messages(control_plane, report);
  if (problem) {
    std::rethrow_exception(problem);
  }
  detail::check_devices(reports);
  return device;
}

void set_up_log(const LaunchEnvironment& launch) {
  set_log_rank(launch.world_size > 1 ? launch.rank : -1);
  set_log_level(launch.rank == 0 ? LogLevel::Info : LogLevel::Warning);
}

}  // namespace

Context Context::create(const ContextOptions& options) {
  // Counts attempts, so that all ranks use the same key when they try again after a failure.
  static std::atomic<int> num_attempts{0};
  const int attempt = num_attempts++;
  auto state = std::make_unique<State>();
  state->before_step = options.before_step;
  auto& launch = state->launch;
  const auto environment = process_environment();
  launch = detect_launch_environment(options.launch, environment);
  const int visible_gpus = options.device == DeviceChoice::Cpu ? 0 : detail::count_gpus();
  const bool cuda = detail::wants_cuda(options.device, detail::built_with_cuda(), visible_gpus);
  if (launch.world_size > 1 && !cuda && !launch.use_mpi) {
    // Before any rank waits for another.
    detail::refuse_without_mpi(launch, detail::MpiRuntime::is_built_in());
  }
  if (launch.use_mpi && launch.world_size != 1 && (!cuda || detail::MpiRuntime::is_built_in())) {
    state->mpi = initialize_mpi(launch, environment, options.control_plane.rendezvous_timeout);
    complete_from_mpi(*state->mpi, launch);
  }
  if (launch.world_size == 0) {
    throw SettingsError(
        "PMIX_RANK is set without the number of ranks, which only MPI knows, and this build has no "
        "MPI; fix: start with torchrun or Slurm's srun, or build with MPI");
  }
  set_up_log(launch);
  std::shared_ptr<detail::Rendezvous> rendezvous;
  if (launch.world_size > 1) {
    rendezvous = detail::make_job_rendezvous(launch, environment, options.control_plane, state->mpi,
                                             attempt);
  }
  state->control_plane = detail::create_control_plane(launch, rendezvous, options.control_plane);
  // From here on a failure is reported to the peers, by ~State at the latest.
  try {
    place_on_host(options, *state->control_plane, launch);
    state->device = choose_device(cuda, visible_gpus, *state->control_plane, launch);
    if (cuda) {
      detail::use_gpu(state->device);
    }
    torch::manual_seed(static_cast<uint64_t>(options.seed));
    state->communicator = detail::create_communicator(launch, state->control_plane, state->device,
                                                      options.communicator, state->mpi);
    state->plan_file = options.plan_file;
    state->read_plan();
  } catch (const std::exception& error) {
    FailureCause cause;
    cause.where = "start";
    cause.message = error.what();
    const auto* known = dynamic_cast<const Error*>(&error);
    cause.exit_code = known != nullptr ? known->exit_code() : ExitCode::UserException;
    state->control_plane->publish_failure(cause);
    state->abandon(error.what());
    throw;
  }
  return Context(std::move(state));
}

// Rank 0's setting counts, because rank 0 owns the file.
void Context::State::read_plan() {
  const auto text = control_plane->broadcast(
      launch.rank == 0 && !plan_file.empty() ? read_plan_file(plan_file) : std::string());
  if (!text.empty()) {
    communicator->choices().adopt(text, plan_file.empty() ? "rank 0's plan file" : plan_file);
    plan_version = communicator->choices().plan().version();
  }
}

void Context::State::write_plan() {
  if (launch.rank != 0 || plan_file.empty()) {
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

bool Context::State::leave() {
  const detail::ActivityScope activity(*control_plane, detail::kCloseActivity);
  // Rank 0 decides for all. After this broadcast all ranks' collectives are done, so a backend may
  // end in any way.
  const std::string keep = mpi != nullptr && mpi->ends_mpi() ? "keep" : "close";
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
    throw PeerLostError(control_plane->failure().to_line());
  }
  return keeps_plane;
}

// Peers may be lost, so this calls nothing that waits for them.
void Context::State::abandon(const std::string& reason) {
  closed = true;
  if (communicator != nullptr) {
    communicator->abort(reason);
  }
  run_teardowns();
  communicator.reset();
  if (mpi != nullptr) {
    mpi->abandon(reason);
  }
  control_plane.reset();
}

Context::Context(std::unique_ptr<State> state) : state_(std::move(state)) {}
Context::Context(Context&&) noexcept = default;

Context& Context::operator=(Context&& other) noexcept {
  std::swap(state_, other.state_);
  return *this;
}

Context::~Context() {
  if (state_ == nullptr || state_->closed) {
    return;
  }
  try {
    auto& plane = *state_->control_plane;
    const bool unwinding = std::uncaught_exceptions() > state_->exceptions_at_start;
    if (unwinding && state_->launch.world_size > 1) {
      FailureCause cause;  // the message is not readable during unwinding
      cause.message = "an exception that nobody published ended this rank";
      cause.exit_code = ExitCode::UserException;
      plane.publish_failure(cause);
    }
    if (unwinding || plane.failed()) {
      state_->abandon(plane.failed() ? plane.failure().to_line() : "an exception ended this rank");
    } else {
      close();
    }
  } catch (const std::exception& error) {
    log_error(concat("while closing: ", error.what()));
  }
}

void detail::ContextHandle::defer_failure(const FailureCause& cause) const {
  if (!state_->deferred_failure) {
    state_->deferred_failure = cause;
  }
}

void detail::ContextHandle::throw_deferred_failure() const {
  if (state_->deferred_failure) {
    state_->control_plane->publish_failure(*state_->deferred_failure);
    detail::throw_failure(*state_->deferred_failure);
  }
}

void Context::close() {
  if (state_->closed) {
    return;
  }
  auto& state = *state_;
  try {
    detail::ContextHandle(*this).throw_deferred_failure();
    state.run_teardowns();
    state.write_plan();
    const bool keeps_plane = state.leave();
    state.closed = true;
    if (keeps_plane) {
      state.mpi->keep_open_until_end(std::move(state.control_plane));
    }
    state.control_plane.reset();
  } catch (const std::exception& error) {
    state.abandon(error.what());
    throw;
  }
}

int Context::rank() const {
  return state_->launch.rank;
}
int Context::world_size() const {
  return state_->launch.world_size;
}
int Context::local_rank() const {
  return state_->launch.local_rank;
}
int Context::local_world_size() const {
  return state_->launch.local_world_size;
}
int Context::node_rank() const {
  return state_->launch.node_rank;
}
int Context::num_nodes() const {
  return state_->launch.num_nodes;
}
at::Device Context::device() const {
  return state_->device;
}
const char* Context::launcher() const {
  return to_string(state_->launch.source);
}
const LaunchEnvironment& Context::launch() const {
  return state_->launch;
}
CommunicatorPtr Context::communicator() const {
  return state_->communicator;
}

ControlPlane& Context::control_plane() const {
  DDP_CHECK(state_->control_plane != nullptr, "the context was closed");
  return *state_->control_plane;
}

void detail::ContextHandle::set_progress(int64_t step, const std::string& where) const {
  if (step >= 0 && state_->before_step) {
    state_->before_step(step);
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
