// SPDX-License-Identifier: Apache-2.0
// Rank 0 of two ranks in one process: a test decides what the other rank contributes.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/exchange.hpp"
#include "comm/tuning/group_choices.hpp"
#include "ddp/comm/communicator.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/state_dict.hpp"
#include "ddp/reduce/options.hpp"
#include "reduce/buckets/bucket_layout.hpp"

namespace testing {

class FakeWork final : public ddp::Work {
 public:
  explicit FakeWork(std::function<void()> reduce) : reduce_(std::move(reduce)) {}

  void wait() override {
    ++num_waits_;
    if (auto reduce = std::exchange(reduce_, nullptr)) {
      reduce();
    }
    if (!error_.empty()) {
      throw ddp::PeerLostError(error_);
    }
  }
  void wait_host(std::optional<std::chrono::milliseconds>) override { wait(); }
  bool is_completed() override { return reduce_ == nullptr; }

  /// wait() throws PeerLostError.
  void fail(std::string message) { error_ = std::move(message); }
  int num_waits() const { return num_waits_; }

 private:
  std::function<void()> reduce_;  // runs at the first wait
  std::string error_;
  int num_waits_ = 0;
};

class FakeCommunicator final : public ddp::Communicator, public ddp::detail::BackendMeasurements {
 public:
  struct Call {
    std::string operation;
    at::Tensor tensor;  ///< the result
    ddp::ReduceOp op = ddp::ReduceOp::Sum;
    std::shared_ptr<FakeWork> work;
  };

  FakeCommunicator() : Communicator({.world_size = 2}) {}

  const char* backend() const override { return "fake"; }
  at::Device device() const override { return at::kCPU; }

  ddp::WorkPtr all_reduce(at::Tensor tensor, ddp::ReduceOp op) override {
    return reduce("all_reduce", tensor, op);
  }
  ddp::WorkPtr reduce_scatter(at::Tensor output, at::Tensor input, ddp::ReduceOp op) override {
    output.copy_(input.narrow(0, 0, output.numel()));
    return reduce("reduce_scatter", output, op);
  }
  ddp::WorkPtr broadcast(at::Tensor tensor, int /*root*/) override {
    return add("broadcast", tensor, ddp::ReduceOp::Sum, [] {});
  }
  ddp::WorkPtr all_gather(at::Tensor output, at::Tensor input) override {
    const at::Tensor other = other_rank ? other_rank(input) : input;
    output.copy_(at::cat({input.reshape({-1}), other.reshape({-1})}).view(output.sizes()));
    return add("all_gather", output, ddp::ReduceOp::Sum, [] {});
  }
  ddp::WorkPtr reduce(at::Tensor tensor, int /*root*/, ddp::ReduceOp op) override {
    return reduce("reduce", tensor, op);
  }
  ddp::WorkPtr send(at::Tensor tensor, int /*destination*/) override {
    return add("send", tensor, ddp::ReduceOp::Sum, [] {});
  }
  ddp::WorkPtr recv(at::Tensor tensor, int /*source*/) override {
    return add("recv", tensor, ddp::ReduceOp::Sum, [] {});
  }
  void barrier() override {}
  ddp::CommunicatorPtr split(int /*color*/, int /*key*/) override { return nullptr; }
  void abort(const std::string& /*reason*/) override {}

  std::vector<Call> calls;
  /// The other rank's values of a reduction or an all_gather; unset: the same as this rank's.
  std::function<at::Tensor(const at::Tensor&)> other_rank;
  /// What all_reduce_table() measures.
  std::vector<ddp::AllReduceRow> measured_rows{{.num_bytes = 1, .us = 10}};

  ddp::detail::BackendMeasurements* measurements() override { return this; }
  std::vector<ddp::AllReduceRow> measure_all_reduce() override { return measured_rows; }

 private:
  ddp::WorkPtr exchange(const ddp::detail::Exchange& exchange) override {
    return add(exchange.name, exchange.any_tensor(), ddp::ReduceOp::Sum, [] {});
  }
  ddp::WorkPtr add(const char* operation, const at::Tensor& tensor, ddp::ReduceOp op,
                   std::function<void()> reduce) {
    calls.push_back({operation, tensor, op, std::make_shared<FakeWork>(std::move(reduce))});
    return calls.back().work;
  }
  ddp::WorkPtr reduce(const char* operation, const at::Tensor& tensor, ddp::ReduceOp op) {
    return add(operation, tensor, op, [this, tensor, op] {
      const at::Tensor other = other_rank ? other_rank(tensor) : tensor.clone();
      if (op == ddp::ReduceOp::Max) {
        tensor.copy_(at::maximum(tensor, other));
        return;
      }
      tensor.add_(other);
      if (op == ddp::ReduceOp::Avg) {
        tensor.div_(2);
      }
    });
  }
};

/// "a" [2, 3] and "b" [4], float32.
inline ddp::NamedParameters parameters_a_and_b() {
  return {{"a", at::zeros({2, 3}).requires_grad_()}, {"b", at::zeros({4}).requires_grad_()}};
}

inline at::Tensor filled_like(const at::Tensor& tensor, double value) {
  return at::full_like(tensor.detach(), value);
}

/// One bucket a parameter, the first parameter first.
inline ddp::BucketLayout one_bucket_each(const std::vector<ddp::ParameterSpec>& specs,
                                         int world_size) {
  std::vector<int> order;
  for (size_t i = 0; i < specs.size(); ++i) {
    order.push_back(static_cast<int>(i));
  }
  return ddp::assign_buckets(specs, {.limits_bytes = {1}, .membership = {.world_size = world_size}},
                             order);
}

/// The arena has memory for every layout.
inline ddp::DdpOptions options_of_any_layout() {
  return {.bucket_cap_mb = ddp::kAutoBuckets};
}

}  // namespace testing
