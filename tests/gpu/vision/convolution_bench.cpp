// SPDX-License-Identifier: Apache-2.0
// Times the ops of convolutional networks inside CUDA graphs.
#include <torch/torch.h>

#include <cstdio>

#include "gpu/graph/graph_timing.hpp"
#include "gpu/vision/convolution_test.hpp"
#include "ops/shared/grad_slot.hpp"
#include "ops/vision/convolution_algorithms.hpp"
#include "support/catch.hpp"

using namespace gpu_test;
using ddp::ops::StemAlgorithm;

namespace {

struct BenchScope {
  BenchScope() { at::globalContext().setBenchmarkCuDNN(true); }
  // On the default stream, a capture would wait for autograd's earlier work.
  c10::cuda::CUDAStreamGuard stream{c10::cuda::getStreamFromPool()};
};

const auto kHalves = torch::TensorOptions().device(torch::kCUDA).dtype(torch::kBFloat16);

}  // namespace

TEST_CASE("times of the stem", "[.][bench]") {
  const BenchScope scope;
  for (const auto& [batch, side, size] :
       {std::tuple{256, 224, 7}, {512, 32, 7}, {64, 32, 7}, {512, 32, 3}, {128, 32, 3}}) {
    const auto image = torch::randn({batch, 3, side, side}, kHalves).contiguous(kLast);
    const auto weight =
        torch::randn({64, 3, size, size}, kHalves).contiguous(kLast).requires_grad_(true);
    for (const auto algorithm :
         {StemAlgorithm::Library, StemAlgorithm::SpaceToDepth, StemAlgorithm::Im2col}) {
      if ((algorithm == StemAlgorithm::Im2col && side > 64) ||
          (algorithm == StemAlgorithm::SpaceToDepth && size == 3)) {
        continue;
      }
      const auto forward = [&] { return ddp::ops::stem_convolution(image, weight, algorithm); };
      const auto direction = torch::randn_like(forward());
      const double both = graph_us([&] { grad({forward()}, {weight}, {direction}); });
      const double there = graph_us([&] {
        const torch::NoGradGuard no_grad;
        forward();
      });
      std::printf("stem %dx%d, %dx%d, algorithm %d: forward %.1f us, backward %.1f us\n", size,
                  size, batch, side, static_cast<int>(algorithm), there, both - there);
    }
    if (size == 3) {
      continue;
    }
    const double cut = graph_us([&] { ddp::ops::stem_space_to_depth(image, torch::kBFloat16); });
    const double bytes = 2.0 * batch * (3.0 * side * side + 16.0 * (side / 2 + 3) * (side / 2 + 3));
    std::printf("space_to_depth %dx%d: %.1f us, its bytes at 4.3 TB/s %.1f us\n", batch, side, cut,
                bytes / 4.3e6);
  }
}

TEST_CASE("times of the head", "[.][bench]") {
  const BenchScope scope;
  for (const auto& [batch, channels, side, classes] :
       {std::tuple{256, 2048, 7, 1000}, {512, 512, 1, 10}, {128, 512, 1, 10}, {64, 512, 1, 10}}) {
    const auto x =
        torch::randn({batch, channels, side, side}, kHalves).contiguous(kLast).requires_grad_(true);
    const auto weight = torch::randn({classes, channels}, kHalves).requires_grad_(true);
    const auto bias = torch::randn({classes}, kHalves).requires_grad_(true);
    const auto labels = torch::randint(classes, {batch}, torch::kLong).to(torch::kCUDA);
    const auto ours = [&] {
      const auto logits = ddp::ops::pooled_linear(x, weight, bias);
      return grad({ddp::ops::cross_entropy(logits, labels, {.label_smoothing = 0.1}).loss},
                  {x, weight, bias});
    };
    const auto plain = [&] {
      const auto logits =
          torch::linear(torch::adaptive_avg_pool2d(x, {1, 1}).flatten(1), weight, bias);
      const auto loss = torch::cross_entropy_loss(logits.to(torch::kFloat), labels, {},
                                                  at::Reduction::Mean, -100, 0.1);
      return grad({loss}, {x, weight, bias});
    };
    std::printf("head %dx%d, %d classes: %.1f us, ATen %.1f us\n", batch, channels, classes,
                graph_us(ours), graph_us(plain));
    const auto logits = ddp::ops::pooled_linear(x, weight, bias);
    const auto loss = ddp::ops::cross_entropy(logits, labels, {.label_smoothing = 0.1}).loss;
    const auto one = torch::ones_like(loss), direction = torch::randn_like(logits);
    std::printf(
        "  pooled_linear %.1f + %.1f us, cross_entropy %.1f + %.1f us\n",
        graph_us([&] { ddp::ops::pooled_linear(x, weight, bias); }), graph_us([&] {
          grad({logits}, {x, weight, bias}, {direction}, true);
        }),
        graph_us([&] { ddp::ops::cross_entropy(logits, labels, {.label_smoothing = 0.1}); }),
        graph_us([&] { grad({loss}, {logits}, {one}, true); }));
  }
}

namespace {

void print_times(int64_t batch, const ConvCase& c) {
  using ddp::ops::Conv2dAlgorithm;
  const auto x = last_leaf({batch, c.channels, c.height, c.width}, torch::kBFloat16);
  const auto weight =
      last_leaf({c.filters, c.channels, c.kernel, c.kernel}, torch::kBFloat16, 0.05);
  std::printf("%ldx%ld_%ld_%ld@%ld/%ld:", static_cast<long>(batch), static_cast<long>(c.kernel),
              static_cast<long>(c.channels), static_cast<long>(c.filters),
              static_cast<long>(c.height), static_cast<long>(c.stride));
  ddp::ops::GradSlot slot{torch::zeros_like(weight.detach())};
  ddp::ops::add_grad_slot(weight, slot);
  for (const auto algorithm : {Conv2dAlgorithm::Library, Conv2dAlgorithm::Product}) {
    const auto run = [&](const torch::Tensor& input) {
      return ddp::ops::conv2d(input, weight, c.stride, c.kernel / 2, algorithm);
    };
    const auto out = run(x), constant = run(x.detach());
    const auto direction = torch::randn_like(out);
    const double forward = graph_us([&] {
      const torch::NoGradGuard no_grad;
      run(x);
    });
    const double dgrad = graph_us([&] { grad({out}, {x}, {direction}, true); });
    const double wgrad = graph_us([&] {
      slot.written = false;
      weight.mutable_grad() = torch::Tensor();
      constant.backward(direction, true);
    });
    std::printf("  %s %.1f / %.1f / %.1f",
                algorithm == Conv2dAlgorithm::Library ? "library" : "product", forward, dgrad,
                wgrad);
  }
  std::printf(" us\n");
  std::fflush(stdout);
  ddp::ops::remove_grad_slot(weight, slot);
}

}  // namespace

TEST_CASE("times of convolutions as products and by the library", "[.][bench]") {
  const BenchScope scope;
  for (const int64_t batch : {512, 64}) {
    print_times(batch, {256, 256, 3, 1, 2, 2});
    print_times(batch, {256, 512, 3, 2, 2, 2});
    print_times(batch, {256, 512, 1, 2, 2, 2});
    print_times(batch, {512, 512, 3, 1, 1, 1});
  }
  for (const auto& c : std::vector<ConvCase>{{64, 64, 1, 1, 56, 56},
                                             {64, 256, 1, 1, 56, 56},
                                             {256, 64, 1, 1, 56, 56},
                                             {256, 128, 1, 1, 56, 56},
                                             {128, 512, 1, 1, 28, 28},
                                             {512, 128, 1, 1, 28, 28},
                                             {512, 256, 1, 1, 28, 28},
                                             {256, 1024, 1, 1, 14, 14},
                                             {1024, 256, 1, 1, 14, 14},
                                             {1024, 512, 1, 1, 14, 14},
                                             {512, 2048, 1, 1, 7, 7},
                                             {2048, 512, 1, 1, 7, 7}}) {
    print_times(256, c);
  }
}
