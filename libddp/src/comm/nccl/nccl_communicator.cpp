// SPDX-License-Identifier: Apache-2.0
#include "comm/job/create_communicator.hpp"

#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <utility>

#include "comm/job/cuda_device.hpp"
#include "comm/nccl/nccl_communicator.hpp"
#include "comm/nccl/nccl_handle.hpp"
#include "comm/nccl/nccl_timing.hpp"
#include "comm/tuning/group_choices.hpp"
#include "core/control/running_clock.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/detail/check.hpp"

namespace ddp::detail {

using namespace std::chrono_literals;

namespace {

// A collective with at most this many thread blocks leaves room for kernels that need all their
// multiprocessors at once.
constexpr int64_t kMostReserved = 24;

// One group of messages. (ncclAllToAll exists from NCCL 2.28 on only.)
ncclResult_t call_exchange(const Exchange& exchange, int rank, ncclComm_t comm,
                           cudaStream_t stream) {
  const auto element_size = exchange.any_tensor().element_size();
  const bool copies_own_part = exchange.copies_own_part(rank);
  auto result = ncclGroupStart();
  for (size_t i = 0; i < exchange.sent.size() && result == ncclSuccess; ++i) {
    const int peer = static_cast<int>(i);
    const bool is_message = peer != rank || copies_own_part;
    const auto num_sent = static_cast<size_t>(exchange.sent[i].size);
    const auto num_received = static_cast<size_t>(exchange.received[i].size);
    if (is_message && num_sent > 0) {
      result =
          ncclSend(exchange.input_at(peer), num_sent * element_size, ncclUint8, peer, comm, stream);
    }
    if (is_message && num_received > 0 && result == ncclSuccess) {
      result = ncclRecv(exchange.output_at(peer), num_received * element_size, ncclUint8, peer,
                        comm, stream);
    }
  }
  const auto ended = ncclGroupEnd();  // also after an error
  return result == ncclSuccess ? ended : result;
}

}  // namespace

NcclCommunicator::NcclCommunicator(NcclCommPtr comm, Membership membership,
                                   const CommunicatorOptions& options,
                                   CollectiveFailureHandler on_failure,
                                   std::shared_ptr<StepTimeouts> timeouts,
                                   std::shared_ptr<CollectiveCheck> check,
                                   const Communicator* parent)
    : Communicator(std::move(membership), parent),
      options_(options),
      on_failure_(std::move(on_failure)),
      check_(std::move(check)),
      timeouts_(std::move(timeouts)),
      handle_(std::move(comm)),
      launcher_(handle_),
      reductions_(handle_, launcher_),
      failures_({.name = "the nccl communicator",
                 .membership = this->membership(),
                 .lanes = [this] { return counters().lanes(); },
                 .describe = [this](const Stall& stall) { return counters().describe(stall); },
                 .poll_async_error = [this] { return handle_.poll_async_error(); },
                 .abort = [this](const std::string& reason) { abort(reason); }},
                on_failure_, timeouts_, handle_.state()) {
  if (world_size() > 1 && options_.nccl_max_ctas > 0 && options_.nccl_max_ctas <= kMostReserved) {
    reservation_.emplace(static_cast<int>(options_.nccl_max_ctas));
  }
}

void NcclCommunicator::start(std::string id, const AddProbe& add_probe) {
  watchdog_ = std::make_unique<Watchdog<std::function<bool()>>>(
      [weak = weak_from_this()] {
        const auto self = weak.lock();
        return self != nullptr && self->failures_.check();
      },
      std::clamp<std::chrono::milliseconds>(timeouts_->shortest() / 10, 10ms, 1000ms));
  id_ = std::move(id);
  add_probe_ = add_probe;
  if (!add_probe_) {
    return;
  }
  const auto source = counters().position_source();
  const auto position = [id = id_, source] {
    auto read = source->read();
    read.id = id;
    return read;
  };
  add_probe_({position, [source] { return source->history(); }});
}

NcclCommunicator::~NcclCommunicator() {
  watchdog_.reset();
  try {
    if (!handle_.destroy()) {
      // A graph that captured collectives writes the counters in its next replay.
      launcher_.counters().abandon();
    }
  } catch (const std::exception& error) {
    log_error(concat("at the end of the nccl communicator: ", error.what()));
  }
}

void NcclCommunicator::abort(const std::string& reason) {
  if (!handle_.state()->abort(reason)) {
    return;
  }
  // A launching thread can block inside NCCL. Setting NCCL's abort flag unblocks it.
  const auto launching = launcher_.lock_within(1s);
  handle_.abort([this] { launcher_.counters().abandon(); });
  children_.abort(reason);
}

CommunicatorPtr NcclCommunicator::split(int color, int key) {
  const int64_t call_number = compare("split");
  const auto lock = launcher_.lock();
  launcher_.check_usable("split");
  const c10::cuda::CUDAGuard guard(device());
  const auto bound = timeouts_->current();
  RunningLimit running_limit(bound);
  const auto split_number = ++num_splits_;
  const auto& state = *handle_.state();
  auto child = split_nccl(handle_.get("split"), handle_.device(), color, key, options_, [&] {
    state.check("split");
    if (running_limit.is_over()) {
      throw PeerLostError(concat("split did not end within ", bound.count(),
                                 " ms: a peer is lost, stuck, or did not call it"));
    }
  });
  if (child == nullptr) {
    return nullptr;
  }
  const auto group = membership_of(child.get(), membership().generation);
  auto made = std::make_shared<NcclCommunicator>(
      std::move(child), group, options_, on_failure_, timeouts_,
      check_ ? check_->of_group(call_number, color, group.world_size) : nullptr, this);
  made->start(concat(id_, "/", split_number, ":", color), add_probe_);
  children_.add(made);
  if (state.aborted()) {  // the concurrent abort may not have seen this child
    made->abort("the communicator it was split from was aborted");
    state.check("split");
  }
  return made;
}

WorkPtr NcclCommunicator::all_reduce(at::Tensor tensor, ReduceOp op) {
  check_all_reduce(*this, tensor, op);
  compare("all_reduce", tensor, op);
  return reductions_.all_reduce(tensor, op);
}

WorkPtr NcclCommunicator::broadcast(at::Tensor tensor, int root) {
  check_broadcast(*this, tensor, root);
  compare("broadcast", tensor, std::nullopt, root);
  return launcher_.launch("broadcast", tensor, {tensor}, [&](ncclComm_t comm, cudaStream_t stream) {
    void* data = tensor.data_ptr();
    return ncclBroadcast(data, data, tensor.nbytes(), ncclUint8, root, comm, stream);
  });
}

WorkPtr NcclCommunicator::reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) {
  check_reduce_scatter(*this, output, input, op);
  compare("reduce_scatter", input, op);
  return reductions_.reduce_scatter(output, input, op);
}

WorkPtr NcclCommunicator::all_gather(at::Tensor output, at::Tensor input) {
  check_all_gather(*this, output, input);
  compare("all_gather", output);
  return launcher_.launch("all_gather", output, {output, input},
                          [&](ncclComm_t comm, cudaStream_t stream) {
                            return ncclAllGather(input.const_data_ptr(), output.data_ptr(),
                                                 input.nbytes(), ncclUint8, comm, stream);
                          });
}

WorkPtr NcclCommunicator::reduce(at::Tensor tensor, int root, ReduceOp op) {
  check_reduce(*this, tensor, root, op);
  compare("reduce", tensor, op, root);
  return reductions_.reduce(tensor, root, rank() == root, op);
}

WorkPtr NcclCommunicator::exchange(const Exchange& exchange) {
  if (compares_now()) {
    compare_text(exchange.name, concat(exchange.name, " (", describe_parts(exchange), ")"),
                 sizes_to_compare(exchange, rank()));
  }
  return launcher_.launch(exchange.name, exchange.described,
                          {exchange.any_tensor(), exchange.input},
                          [&](ncclComm_t comm, cudaStream_t stream) {
                            return call_exchange(exchange, rank(), comm, stream);
                          });
}

WorkPtr NcclCommunicator::send(at::Tensor tensor, int destination) {
  check_peer(*this, "send", tensor, destination);
  return launcher_.launch("send", tensor, {tensor}, [&](ncclComm_t comm, cudaStream_t stream) {
    return ncclSend(tensor.const_data_ptr(), tensor.nbytes(), ncclUint8, destination, comm, stream);
  });
}

WorkPtr NcclCommunicator::recv(at::Tensor tensor, int source) {
  check_peer(*this, "recv", tensor, source);
  return launcher_.launch("recv", tensor, {tensor}, [&](ncclComm_t comm, cudaStream_t stream) {
    return ncclRecv(tensor.data_ptr(), tensor.nbytes(), ncclUint8, source, comm, stream);
  });
}

void NcclCommunicator::barrier() {
  compare("barrier");
  {
    const auto lock = launcher_.lock();
    if (!barrier_buffer_.defined()) {
      barrier_buffer_ = at::zeros({1}, at::device(device()).dtype(at::kInt));
    }
  }
  const auto work = launcher_.launch(
      "barrier", barrier_buffer_, {barrier_buffer_}, [&](ncclComm_t comm, cudaStream_t stream) {
        void* data = barrier_buffer_.data_ptr();
        return ncclAllReduce(data, data, 1, ncclInt32, ncclSum, comm, stream);
      });
  work->wait_host();
}

Plan::Identity NcclCommunicator::plan_identity() const {
  int nccl = 0;
  check_nccl(ncclGetVersion(&nccl), nullptr, "ncclGetVersion");
  auto identity = kernels_identity(device());
  identity["nccl"] = std::to_string(nccl);
  identity["nccl_ctas"] = concat(options_.nccl_min_ctas, "-", options_.nccl_max_ctas);
  return identity;
}

std::vector<AllReduceRow> NcclCommunicator::measure_all_reduce() {
  const auto group = split(/*color=*/0, /*key=*/rank());
  auto& measured = static_cast<NcclCommunicator&>(*group);
  return time_all_reduce(measured, measured.launcher_, measured.reductions_);
}

CommunicatorPtr make_nccl_communicator(ControlPlane& control_plane, at::Device device,
                                       const CommunicatorOptions& options,
                                       CollectiveFailureHandler on_failure,
                                       std::shared_ptr<CollectiveCheck> check,
                                       const AddProbe& add_probe) {
  DDP_CHECK(device.is_cuda() && device.has_index(), device.str());
  const c10::cuda::CUDAGuard guard(device.index());
  auto comm = connect_nccl(control_plane, device.index(), options);
  auto made = std::make_shared<NcclCommunicator>(
      std::move(comm), control_plane.membership(), options, std::move(on_failure),
      std::make_shared<StepTimeouts>(options.first_step_timeout, options.timeout), std::move(check),
      /*parent=*/nullptr);
  made->start("world", add_probe);
  return made;
}

}  // namespace ddp::detail
