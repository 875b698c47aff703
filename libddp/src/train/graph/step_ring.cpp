// SPDX-License-Identifier: Apache-2.0
#include "train/graph/step_ring.hpp"

#include <ATen/ops/item.h>

#include <chrono>
#include <thread>

#include "ddp/core/error.hpp"
#include "ddp/detail/graphed_step_core.hpp"

namespace ddp {
namespace detail {

static_assert(kMaxPublished == StepLog::kMaxScalars);

StepRing::StepRing(Slots slots, std::function<void()> check)
    : slots_(std::move(slots)), check_(std::move(check)) {}

std::vector<at::Tensor> StepRing::scalars_of(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> scalars;
  for (const auto& tensor : outputs) {
    if (is_logged(tensor)) {
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

bool StepRing::is_ready(uint64_t sequence) const {
  auto& published = slots_[sequence % kNumSlots].sequence;
  return std::atomic_ref<uint64_t>(published).load(std::memory_order_acquire) >= sequence;
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
  // The slot may already hold a later step's numbers although its sequence number is old, so
  // `latest_` is checked.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (latest_ >= sequence + kNumSlots) {
    throw SettingsError(concat("a step's numbers were read after ", kNumSlots,
                               " or more later steps; fix: read a LoggedScalar earlier"));
  }
  return value;
}

}  // namespace detail

bool StepLog::is_ready() const {
  return ring_ == nullptr || ring_->is_ready(sequence_);
}

bool LoggedScalar::is_ready() const {
  return ring_ == nullptr || ring_->is_ready(sequence_);
}

double LoggedScalar::value() const {
  if (!has_value()) {
    throw SettingsError("LoggedScalar: the step did not log this number");
  }
  return ring_ == nullptr ? value_ : ring_->value(sequence_, index_);
}

LoggedScalar StepLog::operator[](int index) const {
  if (index < 0 || index >= size_) {
    throw SettingsError(
        concat("StepLog: the step returned ", size_, " numbers; there is no number ", index));
  }
  LoggedScalar scalar;
  scalar.ring_ = ring_;
  scalar.sequence_ = sequence_;
  scalar.index_ = index;
  scalar.value_ = values_[static_cast<size_t>(index)];
  return scalar;
}

}  // namespace ddp
