// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_runtime.hpp"

#include <array>
#include <utility>

#include "comm/mpi_internal.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/trace_recorder.hpp"

namespace ddp::detail {

namespace {

constexpr std::chrono::seconds kFinalizeLimit{30};

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
    throw MismatchError(message + "; the ranks gave tensors of different sizes");
  }
  throw PeerLostError(message);
}

void MpiOperation::start() {
  if (!trace_name.empty()) {
    begin_ns = TraceRecorder::now_ns();
  }
  launch(requests);
}

bool MpiOperation::poll() {
  if (!requests.empty()) {
    int done = 0;
    std::vector<MPI_Status> statuses(requests.size());
    const int code =
        MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, statuses.data());
    if (code == MPI_ERR_IN_STATUS) {
      for (const auto& status : statuses) {
        if (status.MPI_ERROR != MPI_ERR_PENDING) {
          check_mpi(status.MPI_ERROR, "a message");
        }
      }
    }
    check_mpi(code, "MPI_Testall");
    if (done == 0) {
      return false;
    }
    requests.clear();
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

void MpiState::initialize() {
  int initialized = 0;
  check_mpi(MPI_Initialized(&initialized), "MPI_Initialized");
  int provided = MPI_THREAD_SINGLE;
  if (initialized != 0) {
    check_mpi(MPI_Query_thread(&provided), "MPI_Query_thread");
    if (provided < MPI_THREAD_SERIALIZED) {
      throw SettingsError(concat("MPI was initialised before libddp with thread level ", provided,
                                 "; libddp calls MPI from its own thread and needs at least "
                                 "MPI_THREAD_SERIALIZED (",
                                 MPI_THREAD_SERIALIZED,
                                 "): call MPI_Init_thread with it, or leave MPI_Init to libddp"));
    }
  } else {
    // FUNNELED: MPI's "main thread" is the one that initialises, which is this one.
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread");
    initialized_here = true;
  }
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &world), "MPI_Comm_dup");
  check_mpi(MPI_Comm_set_errhandler(world, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_rank(world, &rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(world, &world_size), "MPI_Comm_size");
  reduce_ops = std::make_unique<MpiReduceOps>();
}

void MpiState::finalize() {
  finalized = true;
  check_mpi(MPI_Comm_free(&world), "MPI_Comm_free");
  if (initialized_here) {
    check_mpi(MPI_Finalize(), "MPI_Finalize");
  }
}

MpiThread::MpiThread() : lane_(engine_.make_lane()) {}

// MPI_Init returns on no rank before it was called on all of them.
void MpiThread::initialize(std::chrono::milliseconds timeout) {
  const auto ticket = submit(lane_, "MPI_Init_thread", [state = state_] { state->initialize(); });
  if (!ticket->wait_for(timeout)) {
    throw PeerLostError(
        concat("MPI_Init_thread did not end within ", timeout.count(),
               " ms: a process of this job has not called it; see what the others printed, start "
               "one program on all ranks, or raise context.control_plane.rendezvous_timeout_ms"));
  }
}

MpiThread::~MpiThread() {
  abandon("the MPI runtime was destroyed without an ordered end");
  engine_.stop(std::chrono::seconds(1));
}

MpiThread::Engine::TicketPtr MpiThread::submit(const Engine::LanePtr& lane, const std::string& what,
                                               std::function<void()> action) {
  auto operation = std::make_shared<MpiOperation>();
  operation->describe = [what] { return what; };
  operation->launch = [action = std::move(action)](std::vector<MPI_Request>&) { action(); };
  return engine_.submit(lane, std::move(operation));
}

void MpiThread::call(const Engine::LanePtr& lane, const std::string& what,
                     std::function<void()> action, std::optional<std::chrono::seconds> limit) {
  const auto ticket = submit(lane, what, std::move(action));
  if (!limit) {
    ticket->wait();
  } else if (!ticket->wait_for(*limit)) {
    throw PeerLostError(concat(what, " did not end within ", limit->count(), " s: a rank is gone"));
  }
}

std::string MpiThread::broadcast(const std::string& value, int root,
                                 std::chrono::milliseconds timeout) {
  // Size and bytes are two operations: only the root knows the size.
  const auto send = [&](std::shared_ptr<std::string> bytes) {
    auto operation = std::make_shared<MpiOperation>();
    operation->describe = [] { return std::string("the rendezvous broadcast over MPI"); };
    operation->limit = timeout;
    operation->launch = [state = state_, bytes, root](std::vector<MPI_Request>& requests) {
      check_mpi(MPI_Ibcast(bytes->data(), static_cast<int>(bytes->size()), MPI_CHAR, root,
                           state->world, &requests.emplace_back()),
                "MPI_Ibcast");
    };
    engine_.submit(lane_, std::move(operation))->wait();
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

bool MpiThread::begin_end() {
  const std::lock_guard lock(mutex_);
  return !std::exchange(ended_, true);
}

void MpiThread::finalize() {
  if (begin_end()) {
    call(
        lane_, "MPI_Finalize", [state = state_] { state->finalize(); }, kFinalizeLimit);
    engine_.stop(std::chrono::seconds(10));
  }
}

void MpiThread::abandon(const std::string& reason) {
  if (begin_end()) {
    engine_.abort_all(std::make_exception_ptr(PeerLostError(reason)));
  }
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
