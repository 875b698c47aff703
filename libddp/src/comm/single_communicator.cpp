// SPDX-License-Identifier: Apache-2.0
// The group of one. On CUDA it copies on the caller's current stream, at the same place in program
// order as a collective.
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>
#include <utility>

#include "comm/argument_checks.hpp"
#include "comm/communicator_state.hpp"
#include "comm/exchange.hpp"
#include "comm/job/cuda_device.hpp"
#include "comm/thread_group.hpp"
#include "comm/tuning/group_choices.hpp"
#include "core/control/failure/first_failure.hpp"
#include "ddp/comm/communicator.hpp"
#include "ddp/core/error.hpp"

namespace ddp {
namespace {

class CompletedWork final : public Work {
 public:
  void wait() override {}
  void wait_host(std::optional<std::chrono::milliseconds>) override {}
  bool is_completed() override { return true; }
};

/// A pending copy on a CUDA stream.
class CopyWork final : public Work {
 public:
  explicit CopyWork(at::Device device) : guard_(device.type()), event_(device.type()) {
    event_.record(guard_.getStream(device));
    device_ = device;
  }
  void wait() override { event_.block(guard_.getStream(device_)); }
  void wait_host(std::optional<std::chrono::milliseconds> timeout) override {
    if (!timeout) {
      event_.synchronize();
      return;
    }
    const auto deadline = std::chrono::steady_clock::now() + *timeout;
    while (!event_.query()) {
      if (std::chrono::steady_clock::now() >= deadline) {
        throw PeerLostError(concat("a copy on the single communicator did not end within ",
                                   timeout->count(), " ms"));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  bool is_completed() override { return event_.query(); }

 private:
  c10::impl::VirtualGuardImpl guard_;
  c10::Event event_;
  at::Device device_{at::kCPU};
};

class SingleCommunicator final : public Communicator, public detail::BackendMeasurements {
 public:
  SingleCommunicator(at::Device device, Membership membership, const Communicator* parent = nullptr)
      : Communicator(std::move(membership), parent), device_(device) {}

  const char* backend() const override { return "single"; }
  at::Device device() const override { return device_; }

  WorkPtr all_reduce(at::Tensor tensor, ReduceOp op) override {
    check_usable("all_reduce");
    detail::check_all_reduce(*this, tensor, op);
    return completed();
  }
  WorkPtr broadcast(at::Tensor tensor, int root) override {
    check_usable("broadcast");
    detail::check_broadcast(*this, tensor, root);
    return completed();
  }
  WorkPtr reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) override {
    check_usable("reduce_scatter");
    detail::check_reduce_scatter(*this, output, input, op);
    return copy(output, input);
  }
  WorkPtr all_gather(at::Tensor output, at::Tensor input) override {
    check_usable("all_gather");
    detail::check_all_gather(*this, output, input);
    return copy(output, input);
  }
  WorkPtr reduce(at::Tensor tensor, int root, ReduceOp op) override {
    check_usable("reduce");
    detail::check_reduce(*this, tensor, root, op);
    return completed();
  }
  WorkPtr send(at::Tensor tensor, int destination) override {
    check_usable("send");
    detail::check_peer(*this, "send", tensor, destination);
    return completed();  // unreachable: a group of one has no other rank
  }
  WorkPtr recv(at::Tensor tensor, int source) override {
    check_usable("recv");
    detail::check_peer(*this, "recv", tensor, source);
    return completed();  // unreachable
  }
  void barrier() override { check_usable("barrier"); }
  void group_start() override { detail::ThreadGroup::enter(this); }
  void group_end() override { detail::ThreadGroup::leave(); }

  CommunicatorPtr split(int color, int) override {
    check_usable("split");
    if (color < 0) {
      return nullptr;
    }
    return std::make_shared<SingleCommunicator>(device_, membership(), this);
  }
  void abort(const std::string& reason) override { state_.abort(reason); }
  WorkPtr exchange(const detail::Exchange& exchange) override {
    check_usable(exchange.name);
    return copy(exchange.output, exchange.input);  // the only part is the whole tensor
  }
  detail::BackendMeasurements* measurements() override { return this; }
  Plan::Identity plan_identity() const override { return detail::kernels_identity(device_); }

 private:
  static WorkPtr completed() { return std::make_shared<CompletedWork>(); }

  void check_usable(const char* operation) const {
    detail::refuse_while_unwinding(operation);
    detail::ThreadGroup::check(this, operation);
    state_.check(operation);
  }

  // Copies in memory order like the other backends, because strides may differ.
  WorkPtr copy(const at::Tensor& output, const at::Tensor& input) {
    if (output.const_data_ptr() == input.const_data_ptr()) {
      return completed();
    }
    const auto flat = [](const at::Tensor& t) { return t.as_strided({t.numel()}, {1}); };
    flat(output.detach()).copy_(flat(input.detach()), /*non_blocking=*/true);
    return device_.is_cpu() ? completed() : std::make_shared<CopyWork>(device_);
  }

  const at::Device device_;
  detail::AbortState state_;
};

}  // namespace

CommunicatorPtr make_single_communicator(at::Device device, Membership membership) {
  if (device.is_cuda() && !device.has_index()) {
    throw SettingsError("make_single_communicator: device \"cuda\" has no index; fix: use cuda:0");
  }
  return std::make_shared<SingleCommunicator>(device, std::move(membership));
}

}  // namespace ddp
