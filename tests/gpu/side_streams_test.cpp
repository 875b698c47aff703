// SPDX-License-Identifier: Apache-2.0
// Work on side streams: what a side stream reads must live until it is done, and threads must not
// share side streams. Spinning kernels delay the side streams on purpose.
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/torch.h>

#include <chrono>
#include <future>
#include <thread>

#include "ddp/ops/vision.hpp"
#include "models/memory_format.hpp"
#include "models/precision.hpp"
#include "models/resnet.hpp"
#include "ops/gemm/gemm.hpp"
#include "ops/shared/grad_slot.hpp"
#include "ops/streams/side_streams.hpp"
#include "ops/streams/weight_gradient.hpp"
#include "support/catch.hpp"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kSpin = 200'000'000;  // cycles: 0.1 s
constexpr int64_t kSize = 1 << 20;
const auto kFloats = torch::TensorOptions(torch::kCUDA).dtype(torch::kFloat);

struct OnOwnStream {
  c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  c10::cuda::CUDAStreamGuard guard{stream};
};

struct Slotted {
  torch::Tensor weight = torch::zeros({1}, kFloats).requires_grad_(true);
  ddp::ops::GradSlot slot{torch::zeros({1}, kFloats)};
  Slotted() { ddp::ops::add_grad_slot(weight, slot); }
  ~Slotted() { ddp::ops::remove_grad_slot(weight, slot); }
};

/// x; the gradient of `weight` is 3, summed late from a tensor that only its stream keeps.
class LateGradient : public torch::autograd::Function<LateGradient> {
 public:
  static torch::Tensor forward(AutogradContext* ctx, const torch::Tensor& x,
                               const torch::Tensor& weight, int64_t limit) {
    ctx->save_for_backward({weight});
    ctx->saved_data["limit"] = limit;
    return x.clone();
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto weight = ctx->get_saved_variables()[0];
    const auto threes = torch::full({kSize}, 3.0, kFloats);
    const ddp::ops::detail::WeightGradient gradient(weight, ctx->saved_data["limit"].toInt());
    auto grad = gradient.compute({threes}, [&] {
      at::cuda::sleep(kSpin);
      auto* slot = ddp::ops::find_grad_slot(weight);
      ddp::ops::begin_grad_write(weight, *slot);
      slot->memory.copy_(threes.mean());
      return torch::Tensor();
    });
    return {grads[0], grad, torch::Tensor()};
  }
};

/// x; its backward allocates as much memory as LateGradient's and overwrites it.
class TakesMemory : public torch::autograd::Function<TakesMemory> {
 public:
  static torch::Tensor forward(AutogradContext*, const torch::Tensor& x) { return x.clone(); }
  static variable_list backward(AutogradContext*, variable_list grads) {
    for (int i = 0; i < 4; ++i) {
      kept.push_back(torch::full({kSize}, -100.0, kFloats));
    }
    return {grads[0]};
  }
  static inline std::vector<torch::Tensor> kept;
};

class ThrowsInBackward : public torch::autograd::Function<ThrowsInBackward> {
 public:
  static torch::Tensor forward(AutogradContext*, const torch::Tensor& x) { return x.clone(); }
  static variable_list backward(AutogradContext*, variable_list) {
    TORCH_CHECK(false, "broken");
    return {};
  }
};

/// A ResNet-18 with fixed weights in bf16, whose weight gradients go to float32 slots.
struct SlottedResNet {
  explicit SlottedResNet(bool side_streams) {
    torch::manual_seed(8);
    model = models::resnet18({.num_classes = 10, .side_streams = side_streams});
    model->to(torch::kCUDA);
    models::to_half_but_norms(*model, torch::kBFloat16);
    models::to_channels_last(*model);
    parameters = model->parameters();
    slots.resize(parameters.size());
    for (std::size_t i = 0; i < slots.size(); ++i) {
      slots[i].memory = torch::zeros_like(parameters[i].detach(), torch::kFloat);
      ddp::ops::add_grad_slot(parameters[i], slots[i]);
    }
  }
  SlottedResNet(const SlottedResNet&) = delete;
  SlottedResNet& operator=(const SlottedResNet&) = delete;
  ~SlottedResNet() {
    for (std::size_t i = 0; i < slots.size(); ++i) {
      ddp::ops::remove_grad_slot(parameters[i], slots[i]);
    }
  }
  void forget() {
    for (std::size_t i = 0; i < slots.size(); ++i) {
      slots[i].written = false;
      slots[i].stream = std::nullopt;
      parameters[i].mutable_grad() = torch::Tensor();
    }
  }
  torch::Tensor gradient(std::size_t i) const {
    return slots[i].written ? slots[i].memory : parameters[i].grad().to(torch::kFloat);
  }

  models::ResNet model{nullptr};
  std::vector<torch::Tensor> parameters;
  std::vector<ddp::ops::GradSlot> slots;
};

/// Returns images and labels, and makes cuDNN use the same algorithms from here on.
std::pair<torch::Tensor, torch::Tensor> deterministic_batch() {
  at::globalContext().setDeterministicCuDNN(true);
  at::globalContext().setBenchmarkCuDNN(false);
  const auto images = torch::randn({64, 3, 32, 32}, torch::kCUDA)
                          .to(torch::kBFloat16)
                          .contiguous(torch::MemoryFormat::ChannelsLast);
  return {images, torch::randint(10, {64}, torch::kLong).to(torch::kCUDA)};
}

}  // namespace

TEST_CASE("weight gradients keep what they read until the stream that made it has waited") {
  const OnOwnStream own;
  const ddp::ops::SideStreams streams;
  Slotted main, side;
  const auto x = torch::ones({8}, kFloats).requires_grad_(true);
  // Backward: main's gradient (held), the side task's (beyond its limit: joined, but not with
  // main), then main allocates memory.
  const auto taken = TakesMemory::apply(x);
  ddp::ops::SideTask task(
      x, [&](const torch::Tensor& input) { return LateGradient::apply(input, side.weight, 1); });
  const auto held = LateGradient::apply(taken, main.weight, int64_t{1} << 40);
  (held.sum() + task.wait().sum()).backward();
  TakesMemory::kept.clear();
  CHECK(main.slot.memory.item<float>() == 3);
  CHECK(side.slot.memory.item<float>() == 3);
}

TEST_CASE("a backward that an exception ended releases what its weight gradients read") {
  const OnOwnStream own;
  const auto allocated = [] {
    return c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0].current;
  };
  Slotted slotted;
  const auto x = torch::ones({8}, kFloats).requires_grad_(true);
  auto loss =
      LateGradient::apply(ThrowsInBackward::apply(x), slotted.weight, int64_t{1} << 40).sum();
  const auto before = allocated();
  CHECK_THROWS_WITH(loss.backward(), Catch::Contains("broken"));
  // The engine's thread may free the backward's memory after the caller sees its end.
  for (int i = 0; i < 500 && allocated() >= before + 4 * kSize; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  CHECK(allocated() < before + 4 * kSize);
}

TEST_CASE("the end of a backward waits for the weight gradients of all its streams") {
  const OnOwnStream own;
  const ddp::ops::SideStreams streams;
  Slotted main, side;
  const auto x = torch::ones({8}, kFloats).requires_grad_(true);
  for (int i = 0; i < 3; ++i) {
    main.slot.memory.zero_();
    side.slot.memory.zero_();
    ddp::ops::SideTask task(x, [&](const torch::Tensor& input) {
      return LateGradient::apply(input, side.weight, int64_t{1} << 40);
    });
    const auto held = LateGradient::apply(x, main.weight, int64_t{1} << 40);
    (held.sum() + task.wait().sum()).backward();
    const auto both = main.slot.memory + side.slot.memory;
    CHECK(both.item<float>() == 6);
  }
}

TEST_CASE("the end of a scope waits for work that it started, and the start waits for the caller") {
  const OnOwnStream own;
  const auto counter = torch::zeros({1}, kFloats);
  counter.mul_(1).add_(0);  // the first use of a kernel waits for the whole device
  {
    ddp::ops::SideStreams streams;
    at::cuda::sleep(kSpin);
    counter.fill_(2);
    streams.start(counter.device(), [&] {
      CHECK(c10::cuda::getCurrentCUDAStream() != own.stream);
      at::cuda::sleep(kSpin);
      counter.mul_(3);
    });
    CHECK(c10::cuda::getCurrentCUDAStream() == own.stream);
  }
  counter.add_(1);
  CHECK(counter.item<float>() == 7);
  // Two streams may share a queue of the device, but a capture must not end before they have
  // joined.
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  {
    ddp::ops::SideStreams streams;
    streams.start(counter.device(), [&] { counter.mul_(3); });
  }
  graph.capture_end();
  graph.replay();
  CHECK(counter.item<float>() == 21);
  ddp::ops::SideStreams off(false);
  off.start(counter.device(), [&] { CHECK(c10::cuda::getCurrentCUDAStream() == own.stream); });
}

TEST_CASE("one thread captures side streams while another works on its own") {
  const OnOwnStream own;
  const ddp::ops::SideStreams streams;
  Slotted captured;
  const auto x = torch::ones({8}, kFloats).requires_grad_(true);
  const auto step = [](const torch::Tensor& input, const torch::Tensor& weight) {
    ddp::ops::SideTask task(input, [](const torch::Tensor& of) { return of * 2; });
    (LateGradient::apply(input, weight, int64_t{1} << 40) + task.wait()).sum().backward();
  };
  step(x, captured.weight);
  x.mutable_grad() = torch::Tensor();
  captured.slot.written = false;
  at::cuda::CUDAGraph graph;
  graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  // The capture has an open side task.
  ddp::ops::SideTask open(x.detach(), [](const torch::Tensor& of) { return of * 5; });
  std::async(std::launch::async, [] {
    const OnOwnStream others;
    const ddp::ops::SideStreams streams_of_thread;
    const auto y = torch::ones({8}, kFloats);
    for (int i = 0; i < 3; ++i) {
      ddp::ops::SideTask task(y, [](const torch::Tensor& of) { return of * 7; });
      CHECK(task.wait().sum().item<float>() == 56);
    }
  }).get();
  const auto result = open.wait() + 1;
  step(x, captured.weight);
  graph.capture_end();
  captured.slot.memory.zero_();
  graph.replay();
  CHECK(result.sum().item<float>() == 48);
  CHECK(captured.slot.memory.item<float>() == 3);
  CHECK(x.grad().sum().item<float>() == 24);
}

TEST_CASE("an evaluation on another stream leaves a model's training as it is") {
  // Its late stream must not be the stream that zeroes the counters of the training's kernels.
  models::ResNet model(nullptr), twin(nullptr);
  for (auto* made : {&model, &twin}) {
    torch::manual_seed(4);
    *made = models::resnet18({.num_classes = 10});
    (*made)->to(torch::kCUDA);
    models::to_half_but_norms(**made, torch::kBFloat16);
    models::to_channels_last(**made);
  }
  const auto images = torch::randn({16, 3, 32, 32}, torch::kCUDA)
                          .to(torch::kBFloat16)
                          .contiguous(torch::MemoryFormat::ChannelsLast);
  const OnOwnStream own;
  const torch::NoGradGuard no_grad;
  const auto expected = twin->forward(images);
  c10::cuda::device_synchronize();
  {
    const OnOwnStream other;
    {  // small blocks with nonzero contents
      std::vector<torch::Tensor> used;
      for (int64_t bytes = 512; bytes <= 8192; bytes += 512) {
        for (int i = 0; i < 40; ++i) {
          used.push_back(
              torch::ones({bytes / 4}, torch::TensorOptions(torch::kCUDA).dtype(torch::kInt)));
        }
      }
    }
    at::cuda::sleep(kSpin);
    model->eval();
    model->forward(images);
    model->train();
  }
  CHECK(torch::equal(model->forward(images), expected));
  c10::cuda::device_synchronize();
}

TEST_CASE("products choose no algorithm by stopwatch where bits must repeat") {
  const OnOwnStream own;
  const auto halves = torch::TensorOptions(torch::kCUDA).dtype(torch::kBFloat16);
  const auto product = [&](int64_t m) {
    const auto a = torch::ones({m, 64}, halves), b = torch::ones({64, 48}, halves);
    const auto out = torch::empty({m, 48}, halves);
    at::cuda::CUDAEvent before;
    at::cuda::sleep(kSpin);
    before.record(own.stream);
    ddp::ops::detail::gemm(out, a, b);
    const bool measured = before.query();  // measuring waits for the stream first
    CHECK((out.to(torch::kFloat) == 64).all().item<bool>());
    return measured;
  };
  product(40);  // creates the library's handle and first memory
  CHECK(product(41));
  CHECK_FALSE(product(41));
  at::globalContext().setDeterministicAlgorithms(true, false);
  CHECK_FALSE(product(42));
  CHECK_FALSE(product(41));
  at::globalContext().setDeterministicAlgorithms(false, false);
  CHECK(product(42));
  // A shape whose first use is in a capture.
  const auto a = torch::ones({43, 64}, halves), b = torch::ones({64, 48}, halves);
  const auto out = torch::empty({43, 48}, halves);
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  ddp::ops::detail::gemm(out, a, b);
  graph.capture_end();
  CHECK_FALSE(product(43));
}

TEST_CASE("late side streams leave the bits of a ResNet-18's gradients") {
  const OnOwnStream own;
  const auto [images, labels] = deterministic_batch();
  std::vector<torch::Tensor> plain;
  for (const bool side_streams : {false, true}) {
    SlottedResNet net(side_streams);
    // With a limit of one byte every op joins both streams; with the other limit no op does.
    for (const int64_t limit : {int64_t{1}, int64_t{1} << 30}) {
      for (int round = 0; round < 3; ++round) {
        net.forget();
        for (auto& slot : net.slots) {
          slot.memory.fill_(-1);
        }
        const ddp::ops::SideStreams outer(side_streams, limit);
        Slotted late;
        auto logits = net.model->forward(images);
        if (side_streams) {  // the backward starts with late side streams
          logits = LateGradient::apply(logits, late.weight, limit);
          const ddp::ops::SideTask task(images, [](const torch::Tensor& of) {
            at::cuda::sleep(kSpin / 2);
            return of;
          });
        }
        ddp::ops::cross_entropy(logits, labels).loss.backward();
        for (std::size_t i = 0; i < net.slots.size(); ++i) {
          const auto value = net.gradient(i);
          if (!side_streams && round == 0 && plain.size() <= i) {
            plain.push_back(value.clone());
            CHECK(value.abs().max().item<float>() > 0);
          }
          CHECK(torch::equal(value, plain[i]));
        }
      }
    }
  }
}

TEST_CASE("side streams leave the bits of a ResNet-18's gradients, eager and in a graph") {
  const OnOwnStream own;
  const auto [images, labels] = deterministic_batch();
  std::vector<torch::Tensor> plain;
  for (const bool side_streams : {false, true}) {
    for (const bool captured : {false, true}) {
      CAPTURE(side_streams, captured);
      SlottedResNet net(side_streams);
      const auto step = [&, &images = images, &labels = labels] {
        net.forget();
        ddp::ops::cross_entropy(net.model->forward(images), labels).loss.backward();
      };
      step();
      at::cuda::CUDAGraph graph;
      if (captured) {
        graph.capture_begin();
        step();
        graph.capture_end();
        for (int replay = 0; replay < 20; ++replay) {
          graph.replay();
        }
      }
      for (std::size_t i = 0; i < net.slots.size(); ++i) {
        const auto value = net.gradient(i);
        if (!side_streams && !captured) {
          plain.push_back(value.clone());
          CHECK(value.abs().max().item<float>() > 0);
        } else {
          CHECK(torch::equal(value, plain[i]));
        }
      }
    }
  }
}
