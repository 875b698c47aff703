// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/mpi_runtime.hpp"

#include <array>
#include <optional>
#include <utility>

#include "comm/mpi/mpi_internal.hpp"
#include "core/control/failure/exit_actions.hpp"
#include "core/control/failure/failure_cause.hpp"
#include "core/control/failure/failure_policy.hpp"
#include "core/control/plane_interfaces.hpp"
#include "core/control/wire/authentication.hpp"
#include "core/log/trace_recorder.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {

namespace {

constexpr std::chrono::seconds kEndLimit{30};
// Without a control plane, a rank that still works after its last context cannot be told from a
// frozen one.
constexpr std::chrono::seconds kUnwatchedEndLimit{600};
constexpr std::chrono::milliseconds kPollInterval{50};
constexpr const char* kDifferentSizes =
    "; the ranks gave tensors of different sizes; fix: find them with "
    "context.communicator.check_collectives=true, or give `sizes` to all_gather, all_to_all and "
    "their functions with gradients if ranks have different numbers of rows";

}  // namespace

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) {
    return;
  }
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  int error_class = code;
  MPI_Error_class(code, &error_class);
  const auto message =
      concat(call, " failed: ", std::string(text.data(), static_cast<size_t>(length)));
  if (error_class == MPI_ERR_TRUNCATE) {
    throw MismatchError(message + kDifferentSizes);
  }
  throw PeerLostError(message);
}

void MpiRequests::receive(void* data, int count, MPI_Datatype datatype, int source, int tag,
                          MPI_Comm comm) {
  receives_.push_back({requests_.size(), count, datatype});
  check_mpi(MPI_Irecv(data, count, datatype, source, tag, comm, &requests_.emplace_back()),
            "MPI_Irecv");
}

bool MpiRequests::have_ended(const std::function<std::string()>& describe) {
  int done = 0;
  std::vector<MPI_Status> statuses(requests_.size());
  const int code =
      MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, statuses.data());
  if (code == MPI_ERR_IN_STATUS) {
    for (const auto& status : statuses) {
      if (status.MPI_ERROR != MPI_ERR_PENDING) {
        check_mpi(status.MPI_ERROR, concat("a message of ", describe()).c_str());
      }
    }
  }
  check_mpi(code, "MPI_Testall");
  if (done == 0) {
    return false;
  }
  for (const auto& expected : receives_) {
    int count = 0;
    const auto& status = statuses[expected.request];
    check_mpi(MPI_Get_count(&status, expected.datatype, &count), "MPI_Get_count");
    if (count != expected.count) {
      throw MismatchError(concat(describe(), ": rank ", status.MPI_SOURCE, " of the group sent ",
                                 count, " elements where ", expected.count, " were expected",
                                 kDifferentSizes));
    }
  }
  requests_.clear();
  receives_.clear();
  return true;
}

void MpiOperation::start() {
  if (!trace_name.empty()) {
    begin_ns = TraceRecorder::now_ns();
  }
  launch(requests);
}

bool MpiOperation::poll() {
  if (!requests.empty() && !requests.have_ended(describe)) {
    return false;
  }
  if (may_finish && !may_finish()) {
    return false;
  }
  if (finish) {
    finish();
  }
  auto* recorder = TraceRecorder::active();
  if (recorder != nullptr && !trace_name.empty()) {
    recorder->add(trace_name, "communication", begin_ns, TraceRecorder::now_ns());
  }
  return true;
}

std::exception_ptr MpiOperation::timed_out() const {
  return std::make_exception_ptr(
      PeerLostError(concat(describe(), " did not end within ", limit.count(),
                           " ms: a peer is lost, stuck, or makes other calls than this rank")));
}

void MpiOperation::failed(const std::exception_ptr& error) {
  if (on_failure) {
    on_failure(describe(), error);
  }
}

MpiProcess& MpiProcess::instance() {
  static auto& process = *new MpiProcess;
  return process;
}

MpiProcess::MpiProcess() {
  // OpenSSL registers its exit clean-up at first use. Using it here makes the clean-up run after
  // end(), which still uses the control plane.
  hmac_sha256("first", "use");
  at_exit([this](int) { end(); });
}

void MpiProcess::end() {
  bool is_lost = abandoned_ && control_plane() != nullptr;  // a peer, after the last context
  if (!abandoned_) {
    try {
      finalize();
    } catch (const std::exception& error) {
      log_error(concat("at the end of MPI: ", error.what()));
      abandoned_ = true;
      is_lost = true;
    }
  }
  if (is_lost) {  // mpirun reports 1 for 0 without MPI_Finalize
    const auto watch = control_plane();
    const auto job_end = watch == nullptr ? std::nullopt : job_end_of(*watch);
    replace_success(job_end ? job_end->exit_code : ExitCode::PeerLost);
  }
  std::shared_ptr<ControlPlane> closed;
  {
    const std::lock_guard lock(mutex_);
    closed.swap(control_plane_);
  }
  closed.reset();
  has_ended_ = true;
  engine_.stop(std::chrono::seconds(abandoned_ ? 1 : 10));
}

// MPI_Finalize waits for all ranks. A rank may work on long after its last context.
void MpiProcess::finalize() {
  const auto watch = control_plane();
  if (watch != nullptr) {
    watch->barrier();  // its timeout names the missing ranks
  }
  auto operation = std::make_shared<MpiOperation>();
  operation->describe = [] { return std::string("MPI_Finalize"); };
  operation->launch = [this](MpiRequests&) {
    int finalized = 0;  // set if the program itself finalized MPI
    check_mpi(MPI_Finalized(&finalized), "MPI_Finalized");
    if (initialized_here_ && finalized == 0) {
      check_mpi(MPI_Finalize(), "MPI_Finalize");
    }
  };
  const auto ticket = engine_.submit(engine_.make_lane(), std::move(operation));
  const auto limit = watch != nullptr ? kEndLimit : kUnwatchedEndLimit;
  if (!wait_watched(*ticket, limit)) {
    throw PeerLostError(concat("MPI_Finalize did not end within ", limit.count(),
                               " s: a rank of this job has not reached its end; it may be frozen"));
  }
  // Until all ranks reach this point, heartbeats cover those that are still in MPI_Finalize.
  close_control_plane();
}

std::shared_ptr<ControlPlane> MpiProcess::control_plane() {
  const std::lock_guard lock(mutex_);
  return control_plane_;
}

void MpiProcess::keep_open_until_end(std::shared_ptr<ControlPlane> control_plane) {
  if (auto* service = control_plane->background_service()) {
    service->outlive_context();
  }
  control_plane->add_failure_callback([this](const FailureCause&) { abandon(); });
  const std::lock_guard lock(mutex_);
  control_plane_ = std::move(control_plane);
}

void MpiProcess::close_control_plane() {
  std::shared_ptr<ControlPlane> closed;
  {
    const std::lock_guard lock(mutex_);
    closed.swap(control_plane_);
  }
  if (closed != nullptr) {
    closed->close();
    if (closed->failed()) {
      throw PeerLostError(closed->failure().to_line());
    }
  }
}

bool MpiProcess::wait_watched(Engine::Ticket& ticket, std::chrono::milliseconds limit) {
  const auto watch = control_plane();
  if (watch == nullptr) {
    return ticket.wait_for(limit);
  }
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!ticket.wait_for(kPollInterval)) {
    if (watch->failed()) {
      throw PeerLostError(watch->failure().to_line());
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      return false;
    }
  }
  return true;
}

void MpiProcess::initialize() {
  if (reduce_ops_ != nullptr) {
    return;
  }
  int initialized = 0;
  int finalized = 0;
  check_mpi(MPI_Initialized(&initialized), "MPI_Initialized");
  check_mpi(MPI_Finalized(&finalized), "MPI_Finalized");
  if (finalized != 0) {
    throw SettingsError(
        "MPI_Finalize was called in this process before libddp used MPI, which cannot be "
        "initialised again; fix: call it after the last context, or leave MPI to libddp");
  }
  int provided = MPI_THREAD_SINGLE;
  if (initialized != 0) {
    check_mpi(MPI_Query_thread(&provided), "MPI_Query_thread");
    if (provided < MPI_THREAD_MULTIPLE) {
      throw SettingsError(
          concat("MPI was initialised before libddp with thread level ", provided,
                 "; libddp calls MPI from its own thread at any time, and "
                 "needs MPI_THREAD_MULTIPLE (",
                 MPI_THREAD_MULTIPLE,
                 "); fix: call MPI_Init_thread with it, or leave MPI_Init to libddp"));
    }
  } else {
    // FUNNELED: MPI's "main thread" is the initialising thread, which is this one.
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread");
    initialized_here_ = true;
    // Open MPI reports errors of any non-blocking collective on the world.
    check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN),
              "MPI_Comm_set_errhandler");
  }
  reduce_ops_ = std::make_shared<MpiReduceOps>();
}

Membership membership_of(MPI_Comm comm, int64_t generation) {
  Membership membership{.generation = generation};
  check_mpi(MPI_Comm_rank(comm, &membership.rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(comm, &membership.world_size), "MPI_Comm_size");
  return membership;
}

void MpiState::initialize(MpiProcess& process) {
  begin(process);
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &world), "MPI_Comm_dup");
  check_mpi(MPI_Comm_set_errhandler(world, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  membership = membership_of(world, 0);
}

// The ranks that left make no call.
void MpiState::initialize(MpiProcess& process, const MpiState& last,
                          const std::vector<int>& ranks) {
  begin(process);
  MPI_Group all = MPI_GROUP_NULL, some = MPI_GROUP_NULL;
  check_mpi(MPI_Comm_group(last.world, &all), "MPI_Comm_group");
  check_mpi(MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &some),
            "MPI_Group_incl");
  check_mpi(MPI_Comm_create_group(last.world, some, /*tag=*/0, &world), "MPI_Comm_create_group");
  check_mpi(MPI_Group_free(&some), "MPI_Group_free");
  check_mpi(MPI_Group_free(&all), "MPI_Group_free");
  check_mpi(MPI_Comm_set_errhandler(world, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  membership = membership_of(world, last.membership.generation + 1);
}

void MpiState::begin(MpiProcess& process) {
  process.initialize();
  reduce_ops = process.reduce_ops();
}

MpiThread::MpiThread() : lane_(make_lane()) {
  process_.add_runtime();
}

void MpiThread::initialize(std::chrono::milliseconds timeout) {
  connect(
      "MPI_Init_thread and MPI_Comm_dup",
      [state = state_, &process = process_] { state->initialize(process); }, timeout);
}

std::shared_ptr<MpiRuntime> MpiThread::meet_again(const std::vector<int>& ranks,
                                                  std::chrono::milliseconds timeout) {
  auto next = std::make_shared<MpiThread>();
  next->connect(
      "MPI_Comm_create_group",
      [state = next->state_, last = state_, ranks, &process = process_] {
        state->initialize(process, *last, ranks);
      },
      timeout);
  return next;
}

void MpiThread::connect(const std::string& what, std::function<void()> action,
                        std::chrono::milliseconds timeout) {
  const auto ticket = submit(what, std::move(action));
  if (!process_.wait_watched(*ticket, timeout)) {
    throw PeerLostError(
        concat(what, " did not end within ", timeout.count(),
               " ms: a process of this job has not made this call; fix: see what the others "
               "printed, start one program on all ranks, or raise "
               "context.control_plane.rendezvous_timeout_ms"));
  }
  process_.close_control_plane();  // an earlier context's; this context's is separate
}

MpiThread::~MpiThread() {
  if (mark_ended()) {
    process_.abandon();
  }
  abort_lanes("the MPI runtime was destroyed without an ordered end");
  if (!process_.has_ended()) {
    // A failure handler may still use objects that end with the context.
    wait_until_idle(std::chrono::seconds(1));
  }
}

bool MpiThread::wait_until_idle(std::chrono::milliseconds limit) {
  const auto nothing = std::make_shared<MpiOperation>();
  nothing->describe = [] { return std::string("the end of an MPI runtime"); };
  nothing->launch = [](MpiRequests&) {};
  return engine().submit(engine().make_lane(), nothing)->wait_for(limit);
}

MpiThread::Engine::LanePtr MpiThread::make_lane() {
  auto lane = engine().make_lane();
  const std::lock_guard lock(mutex_);
  std::erase_if(lanes_, [](const auto& other) { return other.expired(); });
  lanes_.push_back(lane);
  return lane;
}

MpiThread::Engine::TicketPtr MpiThread::submit(const std::string& what,
                                               std::function<void()> action) {
  auto operation = std::make_shared<MpiOperation>();
  operation->describe = [what] { return what; };
  operation->launch = [action = std::move(action)](MpiRequests&) { action(); };
  return engine().submit(lane_, std::move(operation));
}

std::string MpiThread::broadcast(const std::string& value, int root,
                                 std::chrono::milliseconds timeout) {
  // Size and bytes are two operations, because only the root knows the size.
  const auto send = [&](std::shared_ptr<std::string> bytes) {
    auto operation = std::make_shared<MpiOperation>();
    operation->describe = [] { return std::string("the rendezvous broadcast over MPI"); };
    operation->limit = timeout;
    operation->launch = [state = state_, bytes, root](MpiRequests& requests) {
      check_mpi(MPI_Ibcast(bytes->data(), static_cast<int>(bytes->size()), MPI_CHAR, root,
                           state->world, &requests.emplace_back()),
                "MPI_Ibcast");
    };
    engine().submit(lane_, std::move(operation))->wait();
  };
  constexpr size_t kSizeDigits = 20;
  auto size = std::to_string(value.size());
  auto header = std::make_shared<std::string>(std::string(kSizeDigits - size.size(), '0') + size);
  send(header);
  auto bytes = std::make_shared<std::string>(value);
  bytes->resize(std::stoull(*header));
  send(bytes);
  return *bytes;
}

bool MpiThread::mark_ended() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(ended_, true)) {
    return false;
  }
  process_.remove_runtime();
  return true;
}

void MpiThread::abort_lanes(const std::string& reason) {
  std::vector<std::weak_ptr<Engine::Lane>> lanes;
  {
    const std::lock_guard lock(mutex_);
    lanes = lanes_;
  }
  for (const auto& weak : lanes) {
    if (const auto lane = weak.lock()) {
      engine().abort(lane, std::make_exception_ptr(PeerLostError(reason)));
    }
  }
}

void MpiThread::finalize() {
  if (mark_ended()) {
    // MPI_Finalize frees the rest: abandoned operations may still use it.
    abort_lanes("the context was closed");
    // The program may call MPI_Finalize itself after this returns, unless another runtime is in
    // use. That runtime may block the MPI thread in a split until its peers join.
    if (process_.num_runtimes() == 0 && !wait_until_idle(kEndLimit)) {
      process_.abandon();
      throw PeerLostError(concat("the MPI thread did not become idle within ", kEndLimit.count(),
                                 " s: a peer is lost, stuck, or makes other calls than this rank"));
    }
  }
}

bool MpiThread::ends_mpi() const {
  return process_.initialized_here() && process_.num_runtimes() == 1;
}

void MpiThread::keep_open_until_end(std::shared_ptr<ControlPlane> control_plane) {
  process_.keep_open_until_end(std::move(control_plane));
}

void MpiThread::abandon(const std::string& reason) {
  mark_ended();
  process_.abandon();  // even after finalize(): a peer may be lost before all ranks have closed
  abort_lanes(reason);
}

std::shared_ptr<MpiRuntime> MpiRuntime::create(std::chrono::milliseconds timeout) {
  auto made = std::make_shared<MpiThread>();
  made->initialize(timeout);
  return made;
}

bool MpiRuntime::is_built_in() {
  return true;
}

}  // namespace ddp::detail
