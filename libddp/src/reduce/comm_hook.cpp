// SPDX-License-Identifier: Apache-2.0
#include "ddp/reduce/comm_hook.hpp"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <utility>

#include "ddp/core/error.hpp"
#include "reduce/comm_hook_table.hpp"

namespace ddp {
namespace {

// The gradients were divided by `divisor` before the sum. For weighted_backward this is corrected
// by divisor / sum(counts).
void scale_divided_sum(GradBucket& bucket) {
  if (bucket.inverse_count.defined()) {
    bucket.buffer.mul_(bucket.inverse_count * bucket.divisor);
  }
}

WorkPtr reduce_sum(const GradBucket& bucket, const at::Tensor& tensor) {
  return bucket.is_last_of_dtype
             ? bucket.communicator->all_reduce(tensor, ReduceOp::Sum)
             : bucket.communicator->all_reduce_overlapped(tensor, ReduceOp::Sum);
}

// Sends tensors in the communicator's own memory, allocated once per layout. There NCCL's symmetric
// kernels add bfloat16 in float32 and round once; a ring rounds at every hop.
class CompressHook final : public CommHook {
 public:
  explicit CompressHook(at::ScalarType wire_dtype) : wire_dtype_(wire_dtype) {}

  std::string name() const override {
    return wire_dtype_ == at::kHalf ? "fp16_compress" : "bf16_compress";
  }
  double wire_fraction() const override { return 0.5; }

  void start(GradBucket& bucket) override {
    buckets_.resize(std::max(buckets_.size(), static_cast<size_t>(bucket.index) + 1));
    auto& own = buckets_[static_cast<size_t>(bucket.index)];
    if (!own.wire.defined()) {
      const auto bytes =
          bucket.buffer.numel() * static_cast<int64_t>(c10::elementSize(wire_dtype_));
      own.wire = bucket.communicator->allocate(bytes).view(wire_dtype_);
    }
    // Divides before the sum, so that the sum of many ranks stays within the wire dtype's range.
    // One kernel, one rounding.
    at::div_out(own.wire, bucket.buffer, at::scalar_tensor(bucket.divisor));
    own.work = reduce_sum(bucket, own.wire);
  }

  void finish(GradBucket& bucket) override {
    auto& own = buckets_[static_cast<size_t>(bucket.index)];
    own.work->wait();
    own.work = nullptr;
    bucket.buffer.copy_(own.wire, /*non_blocking=*/true);
    scale_divided_sum(bucket);
  }

  void reset() override { buckets_.clear(); }

 private:
  struct Bucket {
    at::Tensor wire;
    WorkPtr work;
  };
  at::ScalarType wire_dtype_;
  std::vector<Bucket> buckets_;
};

class FunctionHook final : public CommHook {
 public:
  FunctionHook(std::string name, std::function<WorkPtr(GradBucket&)> start, bool starts_in_group)
      : name_(std::move(name)), start_(std::move(start)), starts_in_group_(starts_in_group) {}

  std::string name() const override { return name_; }
  bool starts_in_group() const override { return starts_in_group_; }

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
  bool starts_in_group_;
  std::vector<WorkPtr> works_;
};

struct NamedHook {
  const char* name;
  std::shared_ptr<CommHook> (*make)(const DdpOptions& options);
};

// A new hook needs a line here; the setting, its documentation and its messages follow.
constexpr NamedHook kHooks[] = {
    {"none", [](const DdpOptions&) -> std::shared_ptr<CommHook> { return nullptr; }},
    {"all_reduce", [](const DdpOptions&) { return make_all_reduce_hook(); }},
    {"fp16_compress", [](const DdpOptions&) { return make_compress_hook(at::kHalf); }},
    {"bf16_compress", [](const DdpOptions&) { return make_compress_hook(at::kBFloat16); }},
    {"powersgd",
     [](const DdpOptions& options) {
       return make_powersgd_hook(
           {.rank = options.powersgd_rank, .start_step = options.powersgd_start_step});
     }},
};

}  // namespace

std::vector<std::string> detail::comm_hook_names() {
  std::vector<std::string> names;
  for (const auto& hook : kHooks) {
    names.emplace_back(hook.name);
  }
  return names;
}

std::shared_ptr<CommHook> detail::make_comm_hook(const DdpOptions& options) {
  for (const auto& hook : kHooks) {
    if (options.comm_hook == hook.name) {
      return hook.make(options);
    }
  }
  throw SettingsError("ddp.comm_hook=" + options.comm_hook + " is unknown; fix: use one of " +
                      c10::Join(", ", comm_hook_names()));
}

std::shared_ptr<CommHook> make_all_reduce_hook() {
  const auto start = [](GradBucket& bucket) {
    bucket.buffer.div_(bucket.divisor);
    return reduce_sum(bucket, bucket.buffer);
  };
  return std::make_shared<FunctionHook>("all_reduce", start, /*starts_in_group=*/true);
}

std::shared_ptr<CommHook> make_compress_hook(at::ScalarType wire_dtype) {
  if (wire_dtype != at::kHalf && wire_dtype != at::kBFloat16) {
    throw SettingsError(concat("make_compress_hook: wire dtype ", wire_dtype,
                               " is not supported; fix: use kHalf or kBFloat16"));
  }
  return std::make_shared<CompressHook>(wire_dtype);
}

std::shared_ptr<CommHook> make_function_hook(std::string name,
                                             std::function<WorkPtr(GradBucket&)> start) {
  if (!start) {
    throw SettingsError("make_function_hook(\"" + name +
                        "\"): the function is empty; fix: give one that reduces bucket.buffer");
  }
  return std::make_shared<FunctionHook>(std::move(name), std::move(start),
                                        /*starts_in_group=*/false);
}

}  // namespace ddp
