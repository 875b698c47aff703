// SPDX-License-Identifier: Apache-2.0
#include "train/captured_step.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

#include "comm/cuda_check.hpp"
#include "train/captured_graph.hpp"

namespace ddp {

std::shared_ptr<const GraphPool::Id> GraphPool::id() {
  auto id = id_.lock();
  if (id == nullptr) {
    id = std::make_shared<const Id>(at::cuda::graph_pool_handle());
    id_ = id;
  }
  return id;
}

namespace detail {
namespace {

constexpr int kSequenceFloats = 4;  // 16 bytes; 8 are used

void put_numbers(const StepNumbers& numbers, uint64_t sequence, FeedArguments& arguments) {
  arguments.numbers[StepFeed::kLr] = static_cast<float>(numbers.lr);
  arguments.numbers[StepFeed::kStep] = static_cast<float>(numbers.step);
  arguments.num_numbers = StepFeed::kFirstFree;
  arguments.sequence = sequence;
}

bool is_fed(const at::Tensor& tensor, int first) {
  return tensor.scalar_type() == at::kFloat && first + tensor.numel() <= kMaxFeedNumbers;
}

void require_fed(const at::Tensor& tensor, int first) {
  if (!is_fed(tensor, first)) {
    throw SettingsError(concat(
        "the batch holds a tensor of ", tensor.numel(), " ", c10::toString(tensor.scalar_type()),
        " on the CPU; only a few float32 numbers (", kMaxFeedNumbers - StepFeed::kFirstFree,
        " a step, of all its micro-batches) travel to the device with it: move the tensor there in "
        "the loader, or lower train.grad_accum_steps"));
  }
}

// Appends the contents of a CPU tensor; returns their index.
int put_tensor(const at::Tensor& tensor, FeedArguments& arguments) {
  const int first = arguments.num_numbers;
  const auto dense = tensor.contiguous();
  std::memcpy(arguments.numbers + first, dense.const_data_ptr<float>(), dense.nbytes());
  arguments.num_numbers += static_cast<int>(tensor.numel());
  return first;
}

void put_copy(const at::Tensor& from, void* to, FeedArguments& arguments) {
  if (arguments.num_copies == kMaxFeedCopies) {
    throw SettingsError(
        concat("a batch of more than ", kMaxFeedCopies, " tensors: stack some of them into one"));
  }
  // Input already in the graph's own memory is not copied.
  const auto bytes = from.const_data_ptr() == to ? 0 : from.nbytes();
  arguments.copies[arguments.num_copies++] = {from.const_data_ptr(), to, bytes};
}

int64_t allocated_bytes(at::Device device, bool peak) {
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  return peak ? stats.allocated_bytes[kAll].peak : stats.allocated_bytes[kAll].current;
}

}  // namespace

StepFeed::StepFeed(at::Device device)
    : memory_(at::empty({kSequenceFloats + kMaxFeedNumbers},
                        at::TensorOptions().dtype(at::kFloat).device(device))),
      numbers_(memory_.narrow(0, kSequenceFloats, kMaxFeedNumbers)) {}

at::Tensor StepFeed::numbers_like(const at::Tensor& like, int index) const {
  return numbers_.narrow(0, index, like.numel()).view(like.sizes());
}

const uint64_t* StepFeed::sequence() const {
  return static_cast<const uint64_t*>(memory_.const_data_ptr());
}

void feed_eagerly(const StepFeed& feed, const StepNumbers& numbers, uint64_t sequence,
                  const std::vector<at::Tensor*>& inputs) {
  FeedArguments arguments{};
  put_numbers(numbers, sequence, arguments);
  for (at::Tensor* input : inputs) {
    if (input->defined() && input->is_cpu() && is_fed(*input, arguments.num_numbers)) {
      *input = feed.numbers_like(*input, put_tensor(*input, arguments));
    }
  }
  arguments.sequence_target = static_cast<uint64_t*>(feed.memory_.mutable_data_ptr());
  arguments.numbers_target = feed.numbers_.mutable_data_ptr<float>();
  const auto stream = c10::cuda::getCurrentCUDAStream(feed.memory_.device().index());
  check_cuda(launch_feed(arguments, stream.stream()), "the kernel that feeds a step");
}

struct CapturedStep::Impl {
  Impl(const StepFeed& feed, GraphPool& graphs) : pool(graphs.id()) {
    arguments.sequence_target = static_cast<uint64_t*>(feed.memory_.mutable_data_ptr());
    arguments.numbers_target = feed.numbers_.mutable_data_ptr<float>();
  }

  /// Fills `arguments` for one step.
  void set(const StepNumbers& numbers, uint64_t sequence, const std::vector<at::Tensor*>& from) {
    arguments.num_copies = 0;
    put_numbers(numbers, sequence, arguments);
    for (size_t i = 0; i < from.size(); ++i) {
      if (!from[i]->defined()) {
        continue;
      }
      if (from[i]->is_cpu()) {
        put_tensor(*from[i], arguments);
      } else {
        put_copy(*from[i], inputs[i].mutable_data_ptr(), arguments);
      }
    }
  }

  FeedArguments arguments{};
  std::vector<at::Tensor> inputs;                   // the graph's own, in the batch's order
  const std::shared_ptr<const GraphPool::Id> pool;  // outlives the graph
  CapturedGraph graph;
};

CapturedStep::CapturedStep() = default;
CapturedStep::~CapturedStep() {
  object_ = nullptr;  // before the graph, which owns its memory
}

std::unique_ptr<CapturedStep> CapturedStep::capture(const Request& request, std::string* failing) {
  std::unique_ptr<CapturedStep> step(new CapturedStep());
  step->impl_ = std::make_unique<Impl>(request.feed, request.pool);
  auto& impl = *step->impl_;
  int number = StepFeed::kFirstFree;
  for (at::Tensor* input : request.call.inputs) {
    auto& own = impl.inputs.emplace_back();
    if (!input->defined()) {
      continue;
    }
    if (input->is_cpu()) {
      require_fed(*input, number);
      own = request.feed.numbers_like(*input, number);
      number += static_cast<int>(input->numel());
    } else {
      own = at::empty_strided(input->sizes(), input->strides(), input->options());
      own.set_requires_grad(input->requires_grad());
    }
  }
  impl.set(request.call.numbers, request.sequence, request.call.inputs);
  for (size_t i = 0; i < impl.inputs.size(); ++i) {
    *request.call.inputs[i] = impl.inputs[i];
  }
  const StepScalars scalars{.lr = request.feed.number(StepFeed::kLr),
                            .step = request.feed.number(StepFeed::kStep)};
  const auto device = request.feed.memory_.device();
  const int64_t missing = missing_bytes(device, *impl.pool, request.step_bytes);
  // Clears casts made by an autocast scope outside the step: the graph would use these stale
  // weights forever.
  at::autocast::clear_cache();
  const FailingOperation failing_operation;
  try {
    impl.graph.begin(*impl.pool, request.generators, impl.arguments);
    take_as_one_block(missing, device);
    {
      auto output = request.call.run(scalars);
      const auto logged = StepRing::scalars_of(output.tensors);
      request.ring.publish(logged, request.feed.sequence());
      step->num_scalars_ = static_cast<int>(logged.size());
      step->object_ = std::move(output.object);
    }
    at::autocast::clear_cache();
    request.at_end();
    impl.graph.end();
    if (const auto copies = impl.graph.host_copies(); !copies.empty()) {
      throw SettingsError("it " + copies);
    }
  } catch (...) {
    *failing = failing_operation.names();
    at::autocast::clear_cache();
    impl.graph.abandon();
    throw;
  }
  return step;
}

void CapturedStep::instantiate() {
  impl_->graph.instantiate();
}

void CapturedStep::replay(const StepNumbers& numbers, uint64_t sequence,
                          const std::vector<at::Tensor*>& inputs) {
  impl_->set(numbers, sequence, inputs);
  impl_->graph.launch(impl_->arguments);
}

int64_t CapturedStep::num_nodes() const {
  return impl_->graph.num_nodes();
}

PeakBytes::PeakBytes(at::Device device)
    : device_(device), before_(allocated_bytes(device, /*peak=*/false)) {
  c10::cuda::CUDACachingAllocator::resetPeakStats(device.index());
}

int64_t PeakBytes::taken() const {
  const int64_t stays = std::max(before_, allocated_bytes(device_, /*peak=*/false));
  return allocated_bytes(device_, /*peak=*/true) - stays;
}

int64_t missing_bytes(at::Device device, GraphPool::Id pool, int64_t bytes) {
  const auto stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  for (const auto& segment :
       c10::cuda::CUDACachingAllocator::snapshot(pool, /*include_traces=*/false).segments) {
    const bool counts = segment.device == device.index() && segment.owner_private_pool_id == pool &&
                        segment.stream == stream;
    bytes -= counts ? static_cast<int64_t>(segment.total_size - segment.allocated_size) : 0;
  }
  size_t free = 0;
  size_t total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return bytes > 0 && static_cast<size_t>(bytes) < free ? bytes : 0;
}

void take_as_one_block(int64_t bytes, at::Device device) {
  if (bytes > 0) {
    try {
      at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
    } catch (const c10::OutOfMemoryError&) {
      return;  // another program or an allocator limit took the memory; smaller pieces may fit
    }
  }
}

void free_cached_memory() {
  c10::cuda::CUDACachingAllocator::emptyCache();
}

void check_device(at::Device device) {
  const auto code = cudaStreamQuery(c10::cuda::getCurrentCUDAStream(device.index()).stream());
  if (code != cudaErrorNotReady) {
    check_cuda(code, "a step");
  }
}

bool stream_can_be_captured(at::Device device) {
  return c10::cuda::getCurrentCUDAStream(device.index()) !=
         c10::cuda::getDefaultCUDAStream(device.index());
}

}  // namespace detail
}  // namespace ddp
