// SPDX-License-Identifier: Apache-2.0
// Collectives of CPU tensors. The caller checks and queues. The MPI thread starts and polls MPI's
// non-blocking collective while the caller computes.
#include "comm/job/create_communicator.hpp"

#include <cstring>
#include <deque>
#include <utility>

#include "comm/argument_checks.hpp"
#include "comm/child_groups.hpp"
#include "comm/collective_label.hpp"
#include "comm/communicator_state.hpp"
#include "comm/mpi/mpi_collectives.hpp"
#include "comm/mpi/mpi_internal.hpp"
#include "comm/thread_group.hpp"
#include "core/control/failure/first_failure.hpp"
#include "core/log/trace_recorder.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/check.hpp"

namespace ddp::detail {
namespace {

class MpiWork final : public Work {
 public:
  MpiWork(std::shared_ptr<ProgressTicket> ticket, std::string name)
      : ticket_(std::move(ticket)), name_(std::move(name)) {}
  void wait() override { ticket_->wait(); }
  void wait_host(std::optional<std::chrono::milliseconds> timeout) override {
    if (!timeout) {
      ticket_->wait();
    } else if (!ticket_->wait_for(*timeout)) {
      throw PeerLostError(concat(name_, " did not end within ", timeout->count(), " ms"));
    }
  }
  bool is_completed() override { return ticket_->is_finished(); }

 private:
  const std::shared_ptr<ProgressTicket> ticket_;
  const std::string name_;
};

// The collectives of one communicator that have not ended, to report this rank's position, and the
// last that ended, for reports.
class CallLog {
 public:
  // `id`: see GroupPosition.
  explicit CallLog(std::string id) : id_(std::move(id)) {}

  // Called by any thread, in call order.
  void add(std::string operation, const at::Tensor& tensor,
           std::shared_ptr<ProgressTicket> ticket) {
    const std::lock_guard lock(mutex_);
    add_caller(caller_);
    drop_ended();
    calls_.push_back({++num_called_, std::move(operation), LabelScope::current(),
                      tensor.defined() ? c10::toString(tensor.scalar_type()) : "",
                      tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0,
                      std::move(ticket)});
  }

  // Returns the id of the group that the last collective, a split with this color, made.
  std::string id_of_child(int color) {
    const std::lock_guard lock(mutex_);
    return id_ + "/" + std::to_string(num_called_) + ":" + std::to_string(color);
  }

  GroupPosition position() {
    const std::lock_guard lock(mutex_);
    GroupPosition position{.id = id_, .num_called = num_called_, .caller = caller_};
    for (const auto& call : calls_) {
      if (call.ticket->is_finished()) {
        continue;
      }
      if (position.pending == 0) {
        position.pending = call.number;
        position.operation = call.operation;
        position.label = call.label ? *call.label : "";
      }
      if (call.ticket->is_waited_for()) {
        position.waited = call.number;
      }
    }
    return position;
  }

  GroupHistory history() {
    const std::lock_guard lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    GroupHistory history;
    for (const auto& call : calls_) {
      const auto times = call.ticket->times();
      history.collectives.push_back({.number = call.number,
                                     .operation = call.operation,
                                     .label = call.label ? *call.label : "",
                                     .dtype = call.dtype,
                                     .num_bytes = call.num_bytes,
                                     .state = state_of(times),
                                     .enqueued_ms = age_ms(times.submitted, now),
                                     .started_ms = age_ms(times.started, now),
                                     .ended_ms = age_ms(times.finished, now)});
    }
    return history;
  }

 private:
  struct Call {
    uint64_t number;
    std::string operation;
    CollectiveLabel label;
    const char* dtype;
    int64_t num_bytes;
    std::shared_ptr<ProgressTicket> ticket;
  };

  static CollectiveState state_of(const ProgressTicket::Times& times) {
    const ProgressTicket::TimePoint never{};
    return times.failed              ? CollectiveState::Failed
           : times.finished != never ? CollectiveState::Ended
           : times.started != never  ? CollectiveState::Started
                                     : CollectiveState::Enqueued;
  }

  void drop_ended() {
    while (calls_.size() >= kMaxHistoryEntries && calls_.front().ticket->is_finished()) {
      calls_.pop_front();
    }
  }

  const std::string id_;
  std::mutex mutex_;
  uint64_t num_called_ = 0;
  CallerThread caller_ = std::thread::id();
  std::deque<Call> calls_;
};

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(std::shared_ptr<MpiThread> runtime, MpiGroupPtr group,
                  MpiCommunicatorOptions options, std::shared_ptr<StepTimeouts> timeouts,
                  std::string id, const Communicator* parent)
      : Communicator(group->membership, parent),
        runtime_(std::move(runtime)),
        group_(std::move(group)),
        options_(std::move(options)),
        timeouts_(std::move(timeouts)),
        lane_(runtime_->make_lane()),
        calls_(std::move(id)) {
    if (options_.add_probe) {
      options_.add_probe(probe_of(position_source_));
    }
  }
  ~MpiCommunicator() override;

  const char* backend() const override { return "mpi"; }
  at::Device device() const override { return at::kCPU; }

  WorkPtr all_reduce(at::Tensor tensor, ReduceOp op) override;
  WorkPtr broadcast(at::Tensor tensor, int root) override;
  WorkPtr reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) override;
  WorkPtr all_gather(at::Tensor output, at::Tensor input) override;
  WorkPtr reduce(at::Tensor tensor, int root, ReduceOp op) override;
  WorkPtr send(at::Tensor tensor, int destination) override;
  WorkPtr recv(at::Tensor tensor, int source) override;
  void barrier() override;
  void group_start() override { ThreadGroup::enter(this); }
  void group_end() override { ThreadGroup::leave(); }
  CommunicatorPtr split(int color, int key) override;
  void abort(const std::string& reason) override;
  void set_step(int64_t step) override { timeouts_->set_step(step); }

 private:
  using Launch = std::function<void(MpiRequests&)>;

  WorkPtr exchange(const Exchange& exchange) override;
  /// Compares a call (name, tensor, operation, root) over the ranks if check_collectives is on.
  /// Returns its number among the compared calls.
  template <typename... Args>
  int64_t compare(const char* name, const Args&... args) const {
    return options_.check ? compare_text(name, describe_call(name, args...)) : 0;
  }
  int64_t compare_text(const char* name, const std::string& call,
                       const std::optional<ExchangeSizes>& sizes = std::nullopt) const {
    const auto poll = [this] { runtime_->engine().check(lane_); };
    poll();
    ThreadGroup::check(this, name);
    return options_.check->compare(call, timeouts_->current(), poll, sizes);
  }
  /// `described` is undefined without a tensor.
  WorkPtr submit(const char* name, const at::Tensor& described, const std::string& detail,
                 Launch launch, std::function<void()> finish = nullptr);
  std::string describe(const char* name, int64_t sequence, const std::string& detail) const;

  const std::shared_ptr<MpiThread> runtime_;
  const MpiGroupPtr group_;
  const MpiCommunicatorOptions options_;
  const std::shared_ptr<StepTimeouts> timeouts_;
  const MpiThread::Engine::LanePtr lane_;
  CallLog calls_;
  const std::shared_ptr<PositionSource> position_source_ = std::make_shared<PositionSource>(
      [this] { return calls_.position(); }, [this] { return calls_.history(); });
  std::mutex mutex_;  // one numbering for all calling threads
  int64_t next_sequence_ = 1;
  ChildGroups children_;
};

// A sum of half types may overflow although their mean is finite.
bool is_mean_of_halves(const at::Tensor& tensor, ReduceOp op) {
  return op == ReduceOp::Avg &&
         (tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16);
}

std::string describe_buffer(const at::Tensor& tensor) {
  return concat(tensor.numel(), " ", c10::toString(tensor.scalar_type()), ", ", tensor.nbytes(),
                " bytes");
}

MpiCommunicator::~MpiCommunicator() {
  position_source_->close();
  if (group_->comm == runtime_->state()->world) {
    return;  // freed by MPI_Finalize
  }
  try {
    auto operation = std::make_shared<MpiOperation>();
    operation->describe = [] { return std::string("MPI_Comm_free"); };
    operation->launch = [](MpiRequests&) {};
    // Open MPI 4.1 crashes if a communicator is freed while its non-blocking collectives run, which
    // the standard allows. So only the last owner of the group frees it.
    operation->may_finish = [group = std::weak_ptr(group_)] { return group.use_count() <= 1; };
    operation->finish = [group = group_] {
      auto comm = group->comm;
      check_mpi(MPI_Comm_free(&comm), "MPI_Comm_free");
    };
    runtime_->engine().submit(lane_, std::move(operation));
  } catch (const std::exception&) {
    // Aborted, or the runtime has ended: MPI_Finalize frees it.
  }
}

std::string MpiCommunicator::describe(const char* name, int64_t sequence,
                                      const std::string& detail) const {
  return concat(
      with_label(concat(name, " #", sequence, " (", detail, ")"), LabelScope::current_text()),
      " of the mpi communicator, rank ", rank(), " of ", world_size());
}

WorkPtr MpiCommunicator::submit(const char* name, const at::Tensor& described,
                                const std::string& detail, Launch launch,
                                std::function<void()> finish) {
  refuse_while_unwinding(name);
  ThreadGroup::check(this, name);
  auto operation = std::make_shared<MpiOperation>();
  operation->limit = timeouts_->current();
  operation->launch = std::move(launch);
  operation->finish = std::move(finish);
  if (TraceRecorder::active() != nullptr) {
    operation->trace_name = LabelScope::trace_name(name);
  }
  const std::lock_guard lock(mutex_);
  const auto text = describe(name, next_sequence_++, detail);
  operation->describe = [text] { return text; };
  // No `this`: the communicator may be destroyed before a peer's death is noticed.
  operation->on_failure = [handler = options_.on_failure, lane = lane_, timeouts = timeouts_,
                           runtime = std::weak_ptr(runtime_)](const std::string& collective,
                                                              const std::exception_ptr& error) {
    if (const auto alive = runtime.lock()) {
      alive->engine().abort(lane, std::make_exception_ptr(PeerLostError(message_of(error))));
    }
    if (handler) {
      handler({collective, timeouts->step(), error});
    }
  };
  auto ticket = runtime_->engine().submit(lane_, std::move(operation));
  if (const std::string_view kind = name; kind != "send" && kind != "recv") {
    calls_.add(kind == "split" ? name : concat(name, " (", detail, ")"), described, ticket);
  }
  return std::make_shared<MpiWork>(std::move(ticket), text);
}

WorkPtr MpiCommunicator::all_reduce(at::Tensor tensor, ReduceOp op) {
  check_all_reduce(*this, tensor, op);
  compare("all_reduce", tensor, op);
  const MpiSpan span(tensor);
  const bool divides_first = is_mean_of_halves(tensor, op);
  std::function<void()> finish;
  if (op == ReduceOp::Avg && !divides_first) {
    finish = [span, n = world_size()] { divide_by(span.data, span.num_elements, span.dtype, n); };
  }
  return submit(
      "all_reduce", tensor, concat(to_string(op), " of ", describe_buffer(tensor)),
      [group = group_, span, op, divides_first](MpiRequests& requests) {
        if (divides_first) {
          divide_by(span.data, span.num_elements, span.dtype, group->membership.world_size);
        }
        launch_all_reduce(*group, span, op, requests);
      },
      std::move(finish));
}

WorkPtr MpiCommunicator::broadcast(at::Tensor tensor, int root) {
  check_broadcast(*this, tensor, root);
  compare("broadcast", tensor, std::nullopt, root);
  return submit("broadcast", tensor, concat("of ", describe_buffer(tensor), ", root ", root),
                [group = group_, span = MpiSpan(tensor), root](MpiRequests& requests) {
                  launch_broadcast(*group, span, root, requests);
                });
}

WorkPtr MpiCommunicator::reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) {
  check_reduce_scatter(*this, output, input, op);
  compare("reduce_scatter", input, op);
  const bool divides_first = is_mean_of_halves(input, op);
  const MpiSpan in(divides_first ? input.clone() : input);  // `input` keeps its values
  const MpiSpan out(output);
  // MPI forbids aliasing; copying the small part preserves the rest of `input`.
  const bool in_place = is_own_part(input, output, rank());
  const MpiSpan target = in_place ? MpiSpan(output.clone()) : out;
  return submit(
      "reduce_scatter", input, concat(to_string(op), " of ", describe_buffer(input)),
      [group = group_, in, target, op, divides_first](MpiRequests& requests) {
        if (divides_first) {
          divide_by(in.data, in.num_elements, in.dtype, group->membership.world_size);
        }
        launch_reduce_scatter(*group, target, in, op, requests);
      },
      [in_place, out, target, divides_last = op == ReduceOp::Avg && !divides_first,
       n = world_size()] {
        if (divides_last) {
          divide_by(target.data, target.num_elements, target.dtype, n);
        }
        if (in_place && out.num_elements > 0) {  // memcpy takes no null pointer
          std::memcpy(out.data, target.data,
                      static_cast<size_t>(out.num_elements * out.element_size));
        }
      });
}

WorkPtr MpiCommunicator::all_gather(at::Tensor output, at::Tensor input) {
  check_all_gather(*this, output, input);
  compare("all_gather", output);
  const bool in_place = is_own_part(output, input, rank());
  return submit(
      "all_gather", output, concat("into ", describe_buffer(output)),
      [group = group_, out = MpiSpan(output), in = MpiSpan(input), in_place](
          MpiRequests& requests) { launch_all_gather(*group, out, in, in_place, requests); });
}

WorkPtr MpiCommunicator::reduce(at::Tensor tensor, int root, ReduceOp op) {
  check_reduce(*this, tensor, root, op);
  compare("reduce", tensor, op, root);
  const bool receives = rank() == root;
  const bool divides_first = is_mean_of_halves(tensor, op);
  // The tensors of the other ranks keep their values.
  const MpiSpan span(divides_first && !receives ? tensor.clone() : tensor);
  std::function<void()> finish;
  if (op == ReduceOp::Avg && !divides_first && receives) {
    finish = [span, n = world_size()] { divide_by(span.data, span.num_elements, span.dtype, n); };
  }
  return submit(
      "reduce", tensor, concat(to_string(op), " of ", describe_buffer(tensor), ", root ", root),
      [group = group_, span, root, op, divides_first](MpiRequests& requests) {
        if (divides_first) {
          divide_by(span.data, span.num_elements, span.dtype, group->membership.world_size);
        }
        launch_reduce(*group, span, root, op, requests);
      },
      std::move(finish));
}

WorkPtr MpiCommunicator::exchange(const Exchange& exchange) {
  const auto parts = describe_parts(exchange);
  if (options_.check) {
    compare_text(exchange.name, concat(exchange.name, " (", parts, ")"),
                 sizes_to_compare(exchange, rank()));
  }
  return submit(exchange.name, exchange.any_tensor(), parts,
                [group = group_, exchange](MpiRequests& requests) {
                  launch_exchange(*group, exchange, requests);
                });
}

WorkPtr MpiCommunicator::send(at::Tensor tensor, int destination) {
  check_peer(*this, "send", tensor, destination);
  return submit("send", tensor, concat("of ", describe_buffer(tensor), " to rank ", destination),
                [group = group_, span = MpiSpan(tensor), destination](MpiRequests& requests) {
                  launch_send(*group, span, destination, requests);
                });
}

WorkPtr MpiCommunicator::recv(at::Tensor tensor, int source) {
  check_peer(*this, "recv", tensor, source);
  return submit("recv", tensor, concat("of ", describe_buffer(tensor), " from rank ", source),
                [group = group_, span = MpiSpan(tensor), source](MpiRequests& requests) {
                  launch_recv(*group, span, source, requests);
                });
}

void MpiCommunicator::barrier() {
  compare("barrier");
  submit("barrier", {}, "no tensor", [group = group_](MpiRequests& requests) {
    check_mpi(MPI_Ibarrier(group->comm, &requests.emplace_back()), "MPI_Ibarrier");
  })->wait_host();
}

CommunicatorPtr MpiCommunicator::split(int color, int key) {
  const int64_t number = compare("split");
  auto child = std::make_shared<MpiGroup>(*group_);
  submit("split", {}, concat("color ", color, ", key ", key),
         [group = group_, child, color, key](MpiRequests&) {
           // The only blocking call: MPI has no non-blocking split. An abort still unblocks the
           // callers.
           check_mpi(
               MPI_Comm_split(group->comm, color < 0 ? MPI_UNDEFINED : color, key, &child->comm),
               "MPI_Comm_split");
           if (color >= 0) {
             child->membership = membership_of(child->comm, group->membership.generation);
           }
         })
      ->wait_host();
  if (color < 0) {
    return nullptr;
  }
  auto options = options_;
  options.check = options_.check
                      ? options_.check->of_group(number, color, child->membership.world_size)
                      : nullptr;
  auto made = std::make_shared<MpiCommunicator>(runtime_, child, options, timeouts_,
                                                calls_.id_of_child(color), this);
  children_.add(made);
  return made;
}

void MpiCommunicator::abort(const std::string& reason) {
  runtime_->engine().abort(
      lane_, std::make_exception_ptr(PeerLostError("the communicator was aborted: " + reason)));
  children_.abort(reason);
}

}  // namespace

CommunicatorPtr make_mpi_communicator(std::shared_ptr<MpiRuntime> runtime,
                                      const MpiCommunicatorOptions& options) {
  auto thread = std::dynamic_pointer_cast<MpiThread>(std::move(runtime));
  DDP_CHECK(thread != nullptr, "make_mpi_communicator needs the runtime of MpiRuntime::create");
  auto group = std::make_shared<MpiGroup>();
  group->state = thread->state();
  group->comm = group->state->world;
  group->membership = thread->membership();
  group->membership.hosts = options.hosts;
  group->max_count = options.max_count;
  return std::make_shared<MpiCommunicator>(
      std::move(thread), std::move(group), options,
      std::make_shared<StepTimeouts>(options.first_step_timeout, options.timeout), "world",
      /*parent=*/nullptr);
}

}  // namespace ddp::detail
