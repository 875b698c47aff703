// SPDX-License-Identifier: Apache-2.0
#include "train/step_ring.hpp"

#include <ATen/ops/item.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "ddp/core/error.hpp"

#ifdef DDP_HAS_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "comm/cuda_check.hpp"
#include "train/step_kernels.hpp"
#endif

namespace ddp {
namespace detail {

std::vector<at::Tensor> StepRing::scalars_of(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> scalars;
  for (const auto& tensor : outputs) {
    if (tensor.defined() && tensor.numel() == 1) {
      scalars.push_back(tensor);
    }
  }
  if (scalars.size() > static_cast<size_t>(StepLog::kMaxScalars)) {
    throw SettingsError(concat("GraphedStep: the step returns ", scalars.size(),
                               " tensors of one element; at most ", StepLog::kMaxScalars,
                               " are logged: stack some of them into one tensor"));
  }
  return scalars;
}

StepLog StepRing::log_now(const std::vector<at::Tensor>& scalars) {
  StepLog log;
  for (const auto& scalar : scalars) {
    log.values_[static_cast<size_t>(log.size_++)] = scalar.item<double>();
  }
  return log;
}

StepLog StepRing::log(uint64_t sequence, int num_scalars) const {
  StepLog log;
  log.ring_ = shared_from_this();
  log.sequence_ = sequence;
  log.size_ = num_scalars;
  return log;
}

void StepRing::begin(uint64_t sequence) {
  if (sequence > StepLog::kMaxStepsAhead) {
    wait(sequence - StepLog::kMaxStepsAhead);
  }
  latest_ = sequence;
}

#ifdef DDP_HAS_CUDA
namespace {

NumberType number_type(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return NumberType::Float;
    case at::kDouble:
      return NumberType::Double;
    case at::kHalf:
      return NumberType::Half;
    case at::kBFloat16:
      return NumberType::BFloat16;
    case at::kLong:
      return NumberType::Int64;
    case at::kInt:
      return NumberType::Int32;
    case at::kByte:
    case at::kBool:
      return NumberType::Byte;
    default:
      throw SettingsError(concat("GraphedStep: the step returns a number of type ",
                                 c10::toString(tensor.scalar_type()),
                                 ", which is not logged: convert it to float32"));
  }
}

uint64_t sequence_in(const PublishedSlot* slots, uint64_t sequence) {
  auto& place = const_cast<PublishedSlot&>(slots[sequence % StepRing::kNumSlots]).sequence;
  return std::atomic_ref<uint64_t>(place).load(std::memory_order_acquire);
}

}  // namespace

StepRing::StepRing(at::Device device, std::function<void()> check)
    : device_(device), check_(std::move(check)) {
  if (!device_.is_cuda()) {
    return;
  }
  const c10::cuda::CUDAGuard guard(device_);
  constexpr size_t kBytes = kNumSlots * sizeof(PublishedSlot);
  check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&slots_), kBytes,
                           cudaHostAllocMapped | cudaHostAllocPortable),
             "cudaHostAlloc of the step's numbers");
  std::fill_n(slots_, kNumSlots, PublishedSlot{});
}

StepRing::~StepRing() {
  if (slots_ != nullptr) {
    cudaFreeHost(slots_);  // waits for the device; errors cannot be reported here
  }
}

void StepRing::publish(const std::vector<at::Tensor>& scalars, const uint64_t* sequence) const {
  PublishArguments arguments{};
  for (const auto& scalar : scalars) {
    if (scalar.device() != device_) {
      throw SettingsError(concat("GraphedStep: the step returns a number on ", scalar.device(),
                                 ", but runs on ", device_, ": return it from the device"));
    }
    arguments.numbers[arguments.count] = scalar.const_data_ptr();
    arguments.types[arguments.count++] = number_type(scalar);
  }
  arguments.sequence = sequence;
  arguments.slots = slots_;  // mapped memory has one address for host and device
  arguments.num_slots = kNumSlots;
  check_cuda(launch_publish(arguments, c10::cuda::getCurrentCUDAStream(device_.index()).stream()),
             "the kernel that publishes a step's numbers");
}

bool StepRing::is_ready(uint64_t sequence) const {
  return sequence_in(slots_, sequence) >= sequence;
}

// Most waits are short (a line is logged), so the host polls often before it sleeps.
void StepRing::wait(uint64_t sequence) const {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  auto next_check = start + std::chrono::milliseconds(10);
  while (!is_ready(sequence)) {
    const auto now = Clock::now();
    if (now - start > std::chrono::microseconds(200)) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    if (now >= next_check) {
      next_check = now + std::chrono::milliseconds(10);
      check_();
    }
  }
}

double StepRing::value(uint64_t sequence, int index) const {
  wait(sequence);
  const double value =
      static_cast<const volatile PublishedSlot&>(slots_[sequence % kNumSlots]).values[index];
  // Does not check the slot's sequence: the device writes it after the numbers, which may be newer.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (latest_ >= sequence + kNumSlots) {
    throw InternalError(concat("the numbers of a step were asked for after ", kNumSlots,
                               " or more later steps: read a StepLog earlier"));
  }
  return value;
}

#else

StepRing::StepRing(at::Device device, std::function<void()> check)
    : device_(device), check_(std::move(check)) {}
StepRing::~StepRing() = default;
void StepRing::publish(const std::vector<at::Tensor>&, const uint64_t*) const {
  throw InternalError("built without CUDA");
}
bool StepRing::is_ready(uint64_t) const {
  return true;
}
void StepRing::wait(uint64_t) const {}
double StepRing::value(uint64_t, int) const {
  throw InternalError("built without CUDA");
}

#endif

}  // namespace detail

bool StepLog::is_ready() const {
  return ring_ == nullptr || ring_->is_ready(sequence_);
}

double StepLog::operator[](int index) const {
  if (index < 0 || index >= size_) {
    throw SettingsError(detail::concat("StepLog: the step returned ", size_,
                                       " numbers; there is no number ", index));
  }
  return ring_ == nullptr ? values_[static_cast<size_t>(index)] : ring_->value(sequence_, index);
}

}  // namespace ddp
