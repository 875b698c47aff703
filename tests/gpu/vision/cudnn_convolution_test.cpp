// SPDX-License-Identifier: Apache-2.0
// Convolutions by a measured engine of cuDNN compared with float64 results of the same rounded
// numbers.
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/torch.h>

#include "ddp/ops/vision.hpp"
#include "gpu/vision/convolution_test.hpp"
#include "ops/shared/grad_slot.hpp"
#include "ops/vision/cudnn_convolution.hpp"
#include "support/catch.hpp"

using namespace gpu_test;
using ddp::ops::detail::Convolution;
using ddp::ops::detail::ConvolutionPass;
using ddp::ops::detail::convolve_by_cudnn;

namespace {

/// Engines are measured only if cuDNN's benchmark is enabled.
struct Benchmark {
  explicit Benchmark(bool wanted = true) { at::globalContext().setBenchmarkCuDNN(wanted); }
  ~Benchmark() { at::globalContext().setBenchmarkCuDNN(false); }
};

struct Shape {
  int64_t batch, channels, size, filters, kernel, stride;
  int64_t output() const { return (size - 1) / stride + 1; }
};

constexpr Shape kShapes[] = {{20, 64, 8, 64, 3, 1},  {20, 64, 8, 128, 3, 2}, {20, 64, 8, 128, 1, 2},
                             {7, 128, 4, 128, 3, 1}, {7, 128, 4, 256, 3, 2}, {7, 128, 4, 256, 1, 2},
                             {3, 16, 13, 24, 3, 1},  {2, 32, 9, 8, 3, 2}};

Convolution random_call(const Shape& s, torch::Dtype dtype) {
  const auto random = [&](torch::IntArrayRef sizes, double scale) {
    return (torch::randn(sizes, torch::kCUDA) * scale).to(dtype).contiguous(kLast);
  };
  return {random({s.batch, s.channels, s.size, s.size}, 1),
          random({s.filters, s.channels, s.kernel, s.kernel}, 0.1),
          random({s.batch, s.filters, s.output(), s.output()}, 1), s.stride, s.kernel / 2};
}

torch::Tensor& result_of(Convolution& call, ConvolutionPass pass) {
  return pass == ConvolutionPass::Forward         ? call.y
         : pass == ConvolutionPass::InputGradient ? call.x
                                                  : call.w;
}

torch::Tensor in_float64(const Convolution& call, ConvolutionPass pass) {
  const auto x = call.x.to(torch::kDouble), w = call.w.to(torch::kDouble);
  if (pass == ConvolutionPass::Forward) {
    return torch::conv2d(x, w, {}, call.stride, call.padding);
  }
  const bool of_input = pass == ConvolutionPass::InputGradient;
  const auto made = at::convolution_backward(
      call.y.to(torch::kDouble), x, w, at::nullopt, {call.stride, call.stride},
      {call.padding, call.padding}, {1, 1}, false, {0, 0}, 1, {of_input, !of_input, false});
  return of_input ? std::get<0>(made) : std::get<1>(made);
}

constexpr ConvolutionPass kPasses[] = {ConvolutionPass::Forward, ConvolutionPass::InputGradient,
                                       ConvolutionPass::WeightGradient};

}  // namespace

TEST_CASE("a measured engine equals float64, in each pass, shape and dtype") {
  torch::manual_seed(1);
  const Benchmark wanted;
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    for (const auto& shape : kShapes) {
      for (const auto pass : kPasses) {
        CAPTURE(dtype, shape.channels, shape.size, shape.kernel, shape.stride,
                static_cast<int>(pass));
        for (int turn = 0; turn < 2; ++turn) {  // first measures, then uses the measured engine
          auto call = random_call(shape, dtype);
          const auto expected = in_float64(call, pass);
          auto& result = result_of(call, pass);
          result = torch::full_like(result, 7);
          REQUIRE(convolve_by_cudnn(pass, call));
          CHECK(relative_error(result, expected) < tolerance(dtype));
        }
      }
    }
  }
}

TEST_CASE("what no engine is chosen for is left alone") {
  const Shape shape{2, 16, 8, 16, 3, 1};
  const auto refused = [](const Convolution& call) {
    const auto before = call.y.clone();
    const bool done = convolve_by_cudnn(ConvolutionPass::Forward, call);
    return !done && torch::equal(call.y, before);
  };
  {
    const Benchmark unwanted(false);
    CHECK(refused(random_call(shape, torch::kBFloat16)));
  }
  const Benchmark wanted;
  CHECK(refused(random_call(shape, torch::kFloat)));
  auto call = random_call(shape, torch::kBFloat16);
  call.w = call.w.to(torch::kHalf);
  CHECK(refused(call));
  call = random_call(shape, torch::kBFloat16);
  call.x = call.x.contiguous();
  CHECK(refused(call));
  call = random_call(shape, torch::kBFloat16);
  const auto memory = torch::zeros({call.x.numel() + 1}, call.x.options());
  call.x = memory.narrow(0, 1, call.x.numel()).as_strided(call.x.sizes(), call.x.strides(), 1);
  CHECK(refused(call));
  at::globalContext().setDeterministicAlgorithms(true, false);
  CHECK(refused(random_call(shape, torch::kBFloat16)));
  at::globalContext().setDeterministicAlgorithms(false, false);
  CHECK(convolve_by_cudnn(ConvolutionPass::Forward, random_call(shape, torch::kBFloat16)));
}

TEST_CASE("a shape that a capture meets first stays with LibTorch") {
  const Benchmark wanted;
  const auto call = random_call({5, 24, 10, 40, 3, 1}, torch::kBFloat16);
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  const bool done = convolve_by_cudnn(ConvolutionPass::Forward, call);
  graph.capture_end();
  CHECK_FALSE(done);
  CHECK_FALSE(convolve_by_cudnn(ConvolutionPass::Forward, call));
}

TEST_CASE("without memory for workspaces an engine that needs none is taken, or LibTorch's way") {
  namespace allocator = c10::cuda::CUDACachingAllocator;
  struct NothingLeft {
    NothingLeft() {
      allocator::emptyCache();
      allocator::setMemoryFraction(1e-6, 0);
    }
    ~NothingLeft() { allocator::setMemoryFraction(1, 0); }
  };
  torch::manual_seed(3);
  const Benchmark wanted;
  int num_done = 0;
  for (const auto pass : kPasses) {
    auto call = random_call({64, 256, 14, 256, 3, 1}, torch::kBFloat16);
    const auto expected = in_float64(call, pass);
    bool done = false;
    {
      const NothingLeft nothing_left;
      CHECK_NOTHROW(done = convolve_by_cudnn(pass, call));
    }
    CAPTURE(static_cast<int>(pass), done);
    CHECK((!done || relative_error(result_of(call, pass), expected) < 0.003));
    num_done += done ? 1 : 0;
  }
  CHECK(num_done > 0);
}

TEST_CASE("conv2d's weight gradient goes straight to a slot of its dtype, and is added to") {
  torch::manual_seed(2);
  const Benchmark wanted;
  for (const auto slot_dtype : {torch::kBFloat16, torch::kFloat}) {
    const auto call = random_call({20, 64, 8, 64, 3, 1}, torch::kBFloat16);
    const auto weight = call.w.clone().requires_grad_(true);
    ddp::ops::GradSlot slot{torch::full_like(call.w, 7, slot_dtype)};
    ddp::ops::add_grad_slot(weight, slot);
    const auto expected = in_float64(call, ConvolutionPass::WeightGradient);
    for (int turn = 1; turn <= 2; ++turn) {
      ddp::ops::conv2d(call.x, weight, 1, 1).backward(call.y);
      CAPTURE(slot_dtype, turn);
      // LibTorch's op computes the gradient for a float32 slot; without a branch it goes to .grad.
      const auto got = slot.written ? slot.memory : weight.grad();
      CHECK(relative_error(got, expected * turn) < 2 * tolerance(torch::kBFloat16));
    }
    CHECK(slot.written == (slot_dtype == torch::kBFloat16));
    ddp::ops::remove_grad_slot(weight, slot);
  }
}
