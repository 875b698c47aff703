// SPDX-License-Identifier: Apache-2.0
#include "train/graph/step_feed.hpp"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "comm/cuda_check.hpp"

namespace ddp::detail {
namespace {

constexpr int kSequenceFloats = 4;  // 16 bytes; 8 are used
constexpr int kLr = 0;
constexpr int kStep = 1;

bool is_fed(const at::Tensor& tensor, int first) {
  return tensor.scalar_type() == at::kFloat && first + tensor.numel() <= kMaxFeedNumbers;
}

}  // namespace

StepFeed::StepFeed(at::Device device)
    : memory_(at::empty({kSequenceFloats + kMaxFeedNumbers},
                        at::TensorOptions().dtype(at::kFloat).device(device))),
      numbers_(memory_.narrow(0, kSequenceFloats, kMaxFeedNumbers)) {}

StepScalars StepFeed::scalars() const {
  return {.lr = numbers_.select(0, kLr), .step = numbers_.select(0, kStep)};
}

at::Tensor StepFeed::numbers_like(const at::Tensor& like, int index) const {
  return numbers_.narrow(0, index, like.numel()).view(like.sizes());
}

const uint64_t* StepFeed::sequence() const {
  return static_cast<const uint64_t*>(memory_.const_data_ptr());
}

FeedArguments StepFeed::arguments() const {
  FeedArguments arguments{};
  arguments.sequence_target = static_cast<uint64_t*>(memory_.mutable_data_ptr());
  arguments.numbers_target = numbers_.mutable_data_ptr<float>();
  return arguments;
}

void StepFeed::feed(const StepNumbers& numbers, uint64_t sequence,
                    const std::vector<at::Tensor*>& inputs) const {
  auto feeding = arguments();
  set_step_numbers(numbers, sequence, feeding);
  for (at::Tensor* input : inputs) {
    if (input->defined() && input->is_cpu() && is_fed(*input, feeding.num_numbers)) {
      *input = numbers_like(*input, append_numbers(*input, feeding));
    }
  }
  const auto stream = c10::cuda::getCurrentCUDAStream(device().index());
  check_cuda(launch_feed(feeding, stream.stream()), "the kernel that copies a step's inputs");
}

void set_step_numbers(const StepNumbers& numbers, uint64_t sequence, FeedArguments& arguments) {
  arguments.numbers[kLr] = static_cast<float>(numbers.lr);
  arguments.numbers[kStep] = static_cast<float>(numbers.step);
  arguments.num_numbers = StepFeed::kFirstFree;
  arguments.num_copies = 0;
  arguments.sequence = sequence;
}

void require_fed(const at::Tensor& tensor, int first) {
  if (!is_fed(tensor, first)) {
    throw SettingsError(concat(
        "the batch has a CPU tensor of ", tensor.numel(), " ", c10::toString(tensor.scalar_type()),
        "; a captured step takes only float32 numbers from the CPU, at most ",
        kMaxFeedNumbers - StepFeed::kFirstFree,
        " in all micro-batches together; fix: move the tensor to the device in the loader, or "
        "lower "
        "train.grad_accum_steps"));
  }
}

int append_numbers(const at::Tensor& tensor, FeedArguments& arguments) {
  const int first = arguments.num_numbers;
  const auto dense = tensor.contiguous();
  std::copy_n(dense.const_data_ptr<float>(), dense.numel(), arguments.numbers + first);
  arguments.num_numbers += static_cast<int>(tensor.numel());
  return first;
}

void append_copy(const at::Tensor& from, void* to, FeedArguments& arguments) {
  if (arguments.num_copies == kMaxFeedCopies) {
    throw SettingsError(
        concat("the batch has more than ", kMaxFeedCopies,
               " tensors, the limit of a captured step; fix: stack some of them into one"));
  }
  const auto bytes = from.const_data_ptr() == to ? 0 : from.nbytes();
  arguments.copies[arguments.num_copies++] = {from.const_data_ptr(), to, bytes};
}

}  // namespace ddp::detail
