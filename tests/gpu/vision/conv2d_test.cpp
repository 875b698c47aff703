// SPDX-License-Identifier: Apache-2.0
// Convolutions on a GPU compared with float64 results of the same rounded numbers, and concurrent
// work.
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/torch.h>

#include <array>

#include "gpu/vision/convolution_test.hpp"
#include "ops/shared/grad_slot.hpp"
#include "ops/streams/side_streams.hpp"
#include "ops/vision/convolution_algorithms.hpp"
#include "support/catch.hpp"

using namespace gpu_test;

namespace {

/// Two backwards into slots of float32 and of x's dtype, on the main stream and on a side stream.
void check_slots(const ConvCase& c, const torch::Tensor& x, torch::Tensor& weight,
                 const torch::Tensor& direction, const torch::Tensor& twice, double bound) {
  for (const auto slot_type : {torch::kFloat, x.scalar_type()}) {
    for (const bool concurrent : {false, true}) {
      const ddp::ops::SideStreams streams(concurrent);
      ddp::ops::GradSlot slot{torch::full_like(weight.detach(), 7, slot_type)};
      ddp::ops::add_grad_slot(weight, slot);
      for (int i = 0; i < 2; ++i) {
        ddp::ops::conv2d(x, weight, c.stride, c.kernel / 2).backward(direction);
      }
      const auto sum = slot.written ? slot.memory : weight.grad();
      const auto current = c10::cuda::getCurrentCUDAStream().unwrap();
      CHECK((slot.written && slot.stream != current) == concurrent);
      CHECK(slot.written >= concurrent);
      CHECK(relative_error(sum, twice) < bound);
      weight.mutable_grad() = torch::Tensor();
      ddp::ops::remove_grad_slot(weight, slot);
    }
  }
}

}  // namespace

TEST_CASE("conv2d on a GPU equals float64, by products and by the library") {
  torch::manual_seed(5);
  using ddp::ops::Conv2dAlgorithm;
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    for (const auto weight_type : {torch::kFloat, dtype}) {
      for (const auto& c : std::vector<ConvCase>{{64, 128, 1, 1, 7, 5},
                                                 {64, 128, 1, 1, 1, 1},
                                                 {256, 512, 1, 2, 2, 2},
                                                 {512, 512, 3, 1, 1, 1},
                                                 {256, 256, 3, 1, 2, 2},
                                                 {256, 512, 3, 2, 2, 2},
                                                 {64, 64, 3, 2, 8, 8},
                                                 {64, 128, 3, 1, 8, 8},
                                                 {128, 64, 3, 1, 4, 4},
                                                 {64, 128, 1, 2, 8, 8},
                                                 {64, 64, 3, 2, 7, 7},
                                                 {72, 64, 3, 1, 8, 8}}) {
        for (const bool last : {true, false}) {
          CAPTURE(dtype, weight_type, c.channels, c.filters, c.kernel, c.stride, c.height, last);
          const auto x = last_leaf({24, c.channels, c.height, c.width}, dtype);
          auto weight = leaf({c.filters, c.channels, c.kernel, c.kernel}, weight_type, 0.05);
          if (last) {
            weight = weight.detach().contiguous(kLast).requires_grad_(true);
          }
          const auto xr = reference_of(x);
          const auto wr = weight.detach().to(dtype).to(torch::kDouble).requires_grad_(true);
          const auto expected = torch::conv2d(xr, wr, {}, c.stride, c.kernel / 2);
          const auto out = ddp::ops::conv2d(x, weight, c.stride, c.kernel / 2,
                                            c.height > 4 && c.kernel == 1 && c.stride == 1
                                                ? Conv2dAlgorithm::Product
                                                : Conv2dAlgorithm::Auto);
          CHECK(out.is_contiguous(kLast));
          CHECK(relative_error(out, expected) < tolerance(dtype));
          const auto direction = torch::randn_like(out);
          const auto got = grad({out}, {x, weight}, {direction}, /*retain_graph=*/true);
          const auto wanted = grad({expected}, {xr, wr}, {direction.to(torch::kDouble)});
          CHECK(relative_error(got[0], wanted[0]) < tolerance(dtype));
          // The gradient sums four blocks per tap, each of them rounded.
          const double bound = 2 * tolerance(dtype);
          CHECK(relative_error(got[1], wanted[1]) < bound);
          CHECK(got[1].scalar_type() == weight_type);
          check_slots(c, x, weight, direction, 2 * wanted[1], bound);
        }
      }
    }
  }
}

TEST_CASE("conv2d takes a prefetched filter where it fits, from the innermost scope") {
  torch::manual_seed(10);
  const torch::NoGradGuard no_grad;
  const auto x = image_of({24, 64, 2, 2}, torch::kBFloat16, true);
  const auto weight = image_of({64, 64, 3, 3}, torch::kBFloat16, true);
  const auto before = ddp::ops::conv2d(x, weight, 1, 1),
             strided = ddp::ops::conv2d(x, weight, 2, 1);
  ddp::ops::prefetch_filter(weight, 1, 2, 2);  // no scope
  {
    const ddp::ops::SideStreams streams;
    ddp::ops::prefetch_filter(weight, 1, 2, 2);
    ddp::ops::prefetch_filter(weight, 1, 8, 8);  // needs no matrix
    torch::cuda::synchronize();
    weight.mul_(2);
    CHECK(torch::equal(ddp::ops::conv2d(x, weight, 1, 1), before));
    CHECK(torch::equal(ddp::ops::conv2d(x, weight, 2, 1), 2 * strided));
    {
      const ddp::ops::SideStreams off(false);
      ddp::ops::prefetch_filter(weight, 1, 2, 2);
      CHECK(torch::equal(ddp::ops::conv2d(x, weight, 1, 1), before));
    }
    const ddp::ops::SideStreams inner;
    ddp::ops::prefetch_filter(weight, 1, 2, 2);
    torch::cuda::synchronize();
    CHECK(torch::equal(ddp::ops::conv2d(x, weight, 1, 1), 2 * before));
  }
  weight.mul_(2);
  CHECK(torch::equal(ddp::ops::conv2d(x, weight, 1, 1), 4 * before));
}

TEST_CASE("a scope of side streams joins prefetched filters that no convolution took") {
  torch::manual_seed(11);
  const torch::NoGradGuard no_grad;
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  const auto weight = image_of({64, 64, 3, 3}, torch::kBFloat16, true);
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  {
    const ddp::ops::SideStreams streams;
    ddp::ops::prefetch_filter(weight, 1, 2, 2);
  }
  CHECK_NOTHROW(graph.capture_end());  // fails if a stream has not joined
  graph.replay();
  torch::cuda::synchronize();
}

namespace {

/// Alternates 3x3 and 1x1 convolutions whose weight gradients go to slots.
class SlottedChain {
 public:
  static constexpr int kLayers = 12;

  SlottedChain() {
    for (int i = 0; i < kLayers; ++i) {
      const int64_t kernel = i % 2 == 0 ? 3 : 1;
      weights_.push_back(last_leaf({64, 64, kernel, kernel}, torch::kBFloat16, 0.05));
      slots_[i].memory = torch::zeros_like(weights_[i].detach(), torch::kFloat);
      ddp::ops::add_grad_slot(weights_[i], slots_[i]);
    }
  }
  SlottedChain(const SlottedChain&) = delete;
  SlottedChain& operator=(const SlottedChain&) = delete;
  ~SlottedChain() {
    for (int i = 0; i < kLayers; ++i) {
      ddp::ops::remove_grad_slot(weights_[i], slots_[i]);
    }
  }
  void step(const torch::Tensor& x, bool concurrent, int64_t limit) {
    using ddp::ops::Conv2dAlgorithm;
    for (auto& slot : slots_) {
      slot.written = false;
      slot.stream = std::nullopt;
    }
    const ddp::ops::SideStreams streams(concurrent, limit);
    auto h = x;
    for (int i = 0; i < kLayers; ++i) {
      h = torch::relu(
          ddp::ops::conv2d(h, weights_[i], 1, i % 2 == 0 ? 1 : 0,
                           i % 2 == 0 ? Conv2dAlgorithm::Auto : Conv2dAlgorithm::Product));
    }
    h.to(torch::kFloat).square().sum().backward();
  }
  void clear() {
    for (auto& slot : slots_) {
      slot.memory.zero_();
    }
  }
  /// Returns the gradients and zeroes them.
  std::vector<torch::Tensor> take() {
    std::vector<torch::Tensor> values;
    for (int i = 0; i < kLayers; ++i) {
      auto& grad = weights_[i].mutable_grad();
      values.push_back((slots_[i].written ? slots_[i].memory : grad.to(torch::kFloat)).clone());
      grad = torch::Tensor();
    }
    clear();
    return values;
  }

 private:
  std::vector<torch::Tensor> weights_;
  std::array<ddp::ops::GradSlot, kLayers> slots_;
};

}  // namespace

TEST_CASE("weight gradients on a side stream have the same bits, eager and in a graph") {
  torch::manual_seed(6);
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  const auto x = last_leaf({256, 64, 8, 8}, torch::kBFloat16);
  SlottedChain chain;
  chain.step(x, false, 0);
  const auto plain = chain.take();
  const auto check_equal = [&](const std::vector<torch::Tensor>& values) {
    for (int i = 0; i < SlottedChain::kLayers; ++i) {
      CHECK(plain[i].abs().max().item<float>() > 0);
      CHECK(torch::equal(values[i], plain[i]));
    }
  };
  for (const int64_t limit : {int64_t{1} << 30, int64_t{1}}) {
    chain.step(x, true, limit);
    check_equal(chain.take());
    at::cuda::CUDAGraph graph;
    x.mutable_grad() = torch::Tensor();
    graph.capture_begin();
    chain.step(x, true, limit);
    graph.capture_end();
    for (int replay = 0; replay < 3; ++replay) {
      chain.clear();
      graph.replay();
    }
    check_equal(chain.take());
  }
}
