// SPDX-License-Identifier: Apache-2.0
#include "ddp/reduce/comm_hook.hpp"

#include <ATen/ATen.h>

#include <utility>

namespace ddp {
namespace {

// What is left to do after a sum that was already divided by the divisor: nothing, or for a
// weighted mean the change from 1/divisor to 1/sum(counts).
void scale_divided_sum(GradBucket& bucket) {
  if (bucket.inverse_divisor.defined()) {
    bucket.buffer.mul_(bucket.inverse_divisor * bucket.divisor);
  }
}

class AllReduceHook final : public CommHook {
 public:
  std::string name() const override { return "all_reduce"; }

  void start(GradBucket& bucket) override {
    bucket.buffer.div_(bucket.divisor);
    works_.resize(std::max(works_.size(), static_cast<size_t>(bucket.index) + 1));
    works_[static_cast<size_t>(bucket.index)] =
        bucket.communicator->all_reduce(bucket.buffer, ReduceOp::Sum);
  }

  void finish(GradBucket& bucket) override {
    works_[static_cast<size_t>(bucket.index)]->wait();
    works_[static_cast<size_t>(bucket.index)] = nullptr;
    scale_divided_sum(bucket);
  }

 private:
  std::vector<WorkPtr> works_;
};

class CompressHook final : public CommHook {
 public:
  explicit CompressHook(at::ScalarType wire_dtype) : wire_dtype_(wire_dtype) {}

  std::string name() const override {
    return wire_dtype_ == at::kHalf ? "fp16_compress" : "bf16_compress";
  }

  void start(GradBucket& bucket) override {
    pending_.resize(std::max(pending_.size(), static_cast<size_t>(bucket.index) + 1));
    auto& pending = pending_[static_cast<size_t>(bucket.index)];
    // Divided before the sum, so that the sum of many ranks stays within the wire's range.
    pending.wire = bucket.buffer.to(wire_dtype_, /*non_blocking=*/true).div_(bucket.divisor);
    pending.work = bucket.communicator->all_reduce(pending.wire, ReduceOp::Sum);
  }

  void finish(GradBucket& bucket) override {
    auto& pending = pending_[static_cast<size_t>(bucket.index)];
    pending.work->wait();
    bucket.buffer.copy_(pending.wire, /*non_blocking=*/true);
    pending = {};
    scale_divided_sum(bucket);
  }

 private:
  struct Pending {
    at::Tensor wire;
    WorkPtr work;
  };
  at::ScalarType wire_dtype_;
  std::vector<Pending> pending_;
};

class FunctionHook final : public CommHook {
 public:
  FunctionHook(std::string name, std::function<WorkPtr(GradBucket&)> start)
      : name_(std::move(name)), start_(std::move(start)) {}

  std::string name() const override { return name_; }

  void start(GradBucket& bucket) override {
    works_.resize(std::max(works_.size(), static_cast<size_t>(bucket.index) + 1));
    works_[static_cast<size_t>(bucket.index)] = start_(bucket);
  }

  void finish(GradBucket& bucket) override {
    auto& work = works_[static_cast<size_t>(bucket.index)];
    if (work) {
      work->wait();
      work = nullptr;
    }
    scale_divided_sum(bucket);
  }

 private:
  std::string name_;
  std::function<WorkPtr(GradBucket&)> start_;
  std::vector<WorkPtr> works_;
};

}  // namespace

std::shared_ptr<CommHook> make_all_reduce_hook() {
  return std::make_shared<AllReduceHook>();
}

std::shared_ptr<CommHook> make_compress_hook(at::ScalarType wire_dtype) {
  if (wire_dtype != at::kHalf && wire_dtype != at::kBFloat16) {
    throw SettingsError(detail::concat("make_compress_hook: wire dtype ", wire_dtype,
                                       " is not supported: use kHalf or kBFloat16"));
  }
  return std::make_shared<CompressHook>(wire_dtype);
}

std::shared_ptr<CommHook> make_function_hook(std::string name,
                                             std::function<WorkPtr(GradBucket&)> start) {
  return std::make_shared<FunctionHook>(std::move(name), std::move(start));
}

std::shared_ptr<CommHook> make_comm_hook(const DdpOptions& options) {
  if (options.comm_hook == "none") {
    return nullptr;
  }
  if (options.comm_hook == "all_reduce") {
    return make_all_reduce_hook();
  }
  if (options.comm_hook == "fp16_compress") {
    return make_compress_hook(at::kHalf);
  }
  if (options.comm_hook == "bf16_compress") {
    return make_compress_hook(at::kBFloat16);
  }
  if (options.comm_hook == "powersgd") {
    return make_powersgd_hook(
        {.rank = options.powersgd_rank, .start_step = options.powersgd_start_step});
  }
  throw SettingsError(
      "ddp.comm_hook=" + options.comm_hook +
      " is unknown: use none, all_reduce, fp16_compress, bf16_compress or powersgd");
}

}  // namespace ddp
