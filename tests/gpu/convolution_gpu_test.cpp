// SPDX-License-Identifier: Apache-2.0
// The ops of convolutional networks on a GPU against float64 results of the same rounded numbers.
#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <cstdio>

#include "ddp/ops/cross_entropy.hpp"
#include "ddp/ops/grad_slot.hpp"
#include "ddp/ops/pooled_linear.hpp"
#include "ddp/ops/stem_convolution.hpp"
#include "graph_timing.hpp"
#include "lm_gpu_test.hpp"
#include "support/catch.hpp"

using ddp::ops::StemAlgorithm;
using gpu_test::graph_us;
using lm_test::leaf;
using lm_test::reference_of;
using lm_test::relative_error;
using torch::autograd::grad;

namespace {

constexpr auto kLast = torch::MemoryFormat::ChannelsLast;
// Of results rounded once: half of 2^-8 (bf16) or 2^-11 (fp16) at most, about a third of it on
// average.
double tolerance(torch::Dtype dtype) {
  return dtype == torch::kBFloat16 ? 0.003 : dtype == torch::kHalf ? 0.0005 : 1e-5;
}

torch::Tensor image_of(torch::IntArrayRef shape, torch::Dtype dtype, bool last) {
  const auto image = dtype == torch::kByte ? torch::randint(256, shape, torch::kCUDA).to(dtype)
                                           : torch::randn(shape, torch::kCUDA).to(dtype);
  return last ? image.contiguous(kLast) : image;
}

}  // namespace

TEST_CASE("space-to-depth on a GPU equals the CPU's bit for bit") {
  torch::manual_seed(1);
  for (const auto type : {torch::kFloat, torch::kBFloat16, torch::kHalf, torch::kByte}) {
    for (const bool last : {false, true}) {
      for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
        const auto image = image_of({3, 3, 37, 24}, type, last);
        const auto cells = ddp::ops::stem_space_to_depth(image, dtype);
        CHECK(cells.is_contiguous(kLast));
        CHECK(torch::equal(cells.cpu(), ddp::ops::stem_space_to_depth(image.cpu(), dtype)));
      }
    }
  }
}

TEST_CASE("the stem on a GPU equals float64, in each algorithm, dtype and layout") {
  torch::manual_seed(2);
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    for (const auto image_type : {torch::kFloat, dtype, torch::kByte}) {
      for (const auto weight_type : {torch::kFloat, dtype}) {
        for (const auto algorithm : {StemAlgorithm::SpaceToDepth, StemAlgorithm::Im2col}) {
          for (const bool last : {false, true}) {
            CAPTURE(dtype, image_type, weight_type, static_cast<int>(algorithm), last);
            const auto image = image_of({4, 3, 30, 32}, image_type, last);
            auto weight = leaf({64, 3, 7, 7}, weight_type, 0.1);
            if (last) {
              weight = weight.detach().contiguous(kLast).requires_grad_(true);
            }
            const auto w = weight.detach().to(dtype).to(torch::kDouble).requires_grad_(true);
            const auto expected = torch::conv2d(image.to(dtype).to(torch::kDouble), w, {}, 2, 3);
            torch::Tensor out;
            {
              at::autocast::set_autocast_enabled(torch::kCUDA, true);
              at::autocast::set_autocast_dtype(torch::kCUDA, dtype);
              out = ddp::ops::stem_convolution(image, weight, algorithm);
              at::autocast::set_autocast_enabled(torch::kCUDA, false);
            }
            CHECK(out.scalar_type() == dtype);
            CHECK(out.is_contiguous(kLast));
            CHECK(relative_error(out, expected) < tolerance(dtype));
            const auto direction = torch::randn_like(out);
            const auto got = grad({out}, {weight}, {direction})[0];
            const auto wanted = grad({expected}, {w}, {direction.to(torch::kDouble)})[0];
            CHECK(got.scalar_type() == weight_type);
            CHECK(got.strides() == weight.strides());
            CHECK(relative_error(got, wanted) < tolerance(dtype));
          }
        }
      }
    }
  }
}

TEST_CASE("cross_entropy on a GPU equals float64, small and large") {
  torch::manual_seed(3);
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    for (const auto& [rows, classes] :
         {std::pair{512, 10}, {1024, 32}, {64, 2}, {1, 10}, {256, 1000}, {1500, 10}, {7, 33}}) {
      for (const double smoothing : {0.0, 0.1}) {
        CAPTURE(dtype, rows, classes, smoothing);
        const auto logits = leaf({rows, classes}, dtype, 3);
        auto labels = torch::randint(classes, {rows}, torch::kLong).to(torch::kCUDA);
        if (rows > 1) {
          labels.slice(0, 0, rows, 7).fill_(-100);
        }
        const auto x = reference_of(logits);
        const auto expected =
            torch::cross_entropy_loss(x, labels, {}, at::Reduction::Mean, -100, smoothing);
        const auto result = ddp::ops::cross_entropy(logits, labels, {.label_smoothing = smoothing});
        CHECK(result.loss.scalar_type() == torch::kFloat);
        CHECK(relative_error(result.loss, expected) < 1e-6);
        const auto hits = logits.argmax(1).eq(labels).sum().item<int64_t>();
        CHECK(result.num_correct.item<int64_t>() == hits);
        const auto got = grad({result.loss * 128}, {logits})[0];
        const auto wanted = grad({expected * 128}, {x})[0];
        CHECK(relative_error(got, wanted) < tolerance(dtype));
        const auto again = ddp::ops::cross_entropy(logits, labels, {.label_smoothing = smoothing});
        CHECK(torch::equal(again.loss, result.loss));
      }
    }
  }
  const auto labels = torch::tensor({0, 10}, torch::kLong).to(torch::kCUDA);
  const auto wrong = ddp::ops::cross_entropy(torch::zeros({2, 10}, torch::kCUDA), labels);
  CHECK(std::isnan(wrong.loss.item<float>()));
  const auto none =
      ddp::ops::cross_entropy(torch::zeros({2, 10}, torch::kCUDA), torch::full_like(labels, -100));
  CHECK(std::isnan(none.loss.item<float>()));
}

TEST_CASE("pooled_linear on a GPU equals float64, fused and by products, into slots too") {
  torch::manual_seed(4);
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    for (const auto weight_type : {torch::kFloat, dtype}) {
      for (const auto& [channels, side, classes] : {std::tuple{512, 1, 10},
                                                    {512, 2, 16},
                                                    {64, 4, 32},
                                                    {2048, 7, 10},
                                                    {2048, 7, 1000},
                                                    {512, 1, 100},
                                                    {72, 3, 17}}) {
        CAPTURE(dtype, weight_type, channels, side, classes);
        const auto x =
            leaf({37, channels, side, side}, dtype).detach().contiguous(kLast).requires_grad_(true);
        auto weight = leaf({classes, channels}, weight_type, 0.05);
        auto bias = leaf({classes}, weight_type);
        const auto xr = reference_of(x), wr = reference_of(weight), br = reference_of(bias);
        const auto expected = torch::linear(xr.mean({2, 3}), wr, br);
        const auto out = ddp::ops::pooled_linear(x, weight, bias);
        CHECK(out.scalar_type() == dtype);
        // By products the pooled values and float32 weights are rounded too.
        const double bound = 3 * tolerance(dtype);
        CHECK(relative_error(out, expected) < bound);
        const auto direction = torch::randn_like(out);
        const auto got = grad({out}, {x, weight, bias}, {direction}, /*retain_graph=*/true);
        const auto wanted = grad({expected}, {xr, wr, br}, {direction.to(torch::kDouble)});
        CHECK(got[0].is_contiguous(kLast));
        for (std::size_t i = 0; i < 3; ++i) {
          CAPTURE(i);
          CHECK(relative_error(got[i], wanted[i]) < bound);
        }
        ddp::ops::GradSlot weight_slot{torch::zeros_like(weight.detach(), torch::kFloat)};
        ddp::ops::GradSlot bias_slot{torch::zeros_like(bias.detach(), torch::kFloat)};
        ddp::ops::set_grad_slot(weight, &weight_slot);
        ddp::ops::set_grad_slot(bias, &bias_slot);
        for (int i = 0; i < 2; ++i) {
          ddp::ops::pooled_linear(x, weight, bias).backward(direction);
        }
        CHECK_FALSE(weight.grad().defined());
        CHECK(relative_error(weight_slot.memory, 2 * wanted[1]) < bound);
        CHECK(relative_error(bias_slot.memory, 2 * wanted[2]) < bound);
        ddp::ops::set_grad_slot(weight, nullptr);
        ddp::ops::set_grad_slot(bias, nullptr);
      }
    }
  }
}

TEST_CASE("times of stem and head", "[.][bench]") {
  at::globalContext().setBenchmarkCuDNN(true);
  const auto bf16 = torch::TensorOptions().device(torch::kCUDA).dtype(torch::kBFloat16);
  for (const auto& [batch, side] : {std::pair{256, 224}, {512, 32}, {128, 32}, {64, 32}}) {
    const auto image = torch::randn({batch, 3, side, side}, bf16).contiguous(kLast);
    const auto weight = torch::randn({64, 3, 7, 7}, bf16).contiguous(kLast).requires_grad_(true);
    for (const auto algorithm :
         {StemAlgorithm::Library, StemAlgorithm::SpaceToDepth, StemAlgorithm::Im2col}) {
      if (algorithm == StemAlgorithm::Im2col && side > 64) {
        continue;
      }
      const auto forward = [&] { return ddp::ops::stem_convolution(image, weight, algorithm); };
      const auto direction = torch::randn_like(forward());
      const double both = graph_us([&] { grad({forward()}, {weight}, {direction}); });
      const double there = graph_us([&] {
        const torch::NoGradGuard no_grad;
        forward();
      });
      std::printf("stem %dx%d algorithm %d: forward %.1f us, backward %.1f us\n", batch, side,
                  static_cast<int>(algorithm), there, both - there);
    }
    const double cut = graph_us([&] { ddp::ops::stem_space_to_depth(image, torch::kBFloat16); });
    const double bytes = 2.0 * batch * (3.0 * side * side + 16.0 * (side / 2 + 3) * (side / 2 + 3));
    std::printf("space_to_depth %dx%d: %.1f us, its bytes at 4.3 TB/s %.1f us\n", batch, side, cut,
                bytes / 4.3e6);
  }
  for (const auto& [batch, channels, side, classes] :
       {std::tuple{256, 2048, 7, 1000}, {512, 512, 1, 10}, {128, 512, 1, 10}, {64, 512, 1, 10}}) {
    const auto x =
        torch::randn({batch, channels, side, side}, bf16).contiguous(kLast).requires_grad_(true);
    const auto weight = torch::randn({classes, channels}, bf16).requires_grad_(true);
    const auto bias = torch::randn({classes}, bf16).requires_grad_(true);
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
  }
}
