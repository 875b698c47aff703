// SPDX-License-Identifier: Apache-2.0
// Stem, head and loss of convolutional networks on a GPU compared with float64 results of the same
// rounded numbers.
#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include "gpu/vision/convolution_test.hpp"
#include "ops/shared/grad_slot.hpp"
#include "ops/vision/convolution_algorithms.hpp"
#include "support/catch.hpp"

using namespace gpu_test;
using ddp::ops::StemAlgorithm;

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
  const auto algorithm_and_size = {std::pair{StemAlgorithm::SpaceToDepth, 7},
                                   {StemAlgorithm::Im2col, 7},
                                   {StemAlgorithm::Im2col, 3}};
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    for (const auto image_type : {torch::kFloat, dtype, torch::kByte}) {
      for (const auto weight_type : {torch::kFloat, dtype}) {
        for (const auto& [algorithm, size] : algorithm_and_size) {
          for (const bool last : {false, true}) {
            CAPTURE(dtype, image_type, weight_type, static_cast<int>(algorithm), size, last);
            const auto image = image_of({4, 3, 30, 32}, image_type, last);
            auto weight = leaf({64, 3, size, size}, weight_type, 0.1);
            if (last) {
              weight = weight.detach().contiguous(kLast).requires_grad_(true);
            }
            const auto w = weight.detach().to(dtype).to(torch::kDouble).requires_grad_(true);
            const auto expected = torch::conv2d(image.to(dtype).to(torch::kDouble), w, {},
                                                size == 7 ? 2 : 1, size / 2);
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

TEST_CASE("the stem's products equal float64 at other sizes and numbers of filters, into slots") {
  torch::manual_seed(9);
  const auto dtype = torch::kBFloat16;
  for (const auto& [batch, height, width, filters, size] : {std::tuple{5, 64, 50, 64, 7},
                                                            {3, 9, 7, 64, 7},
                                                            {700, 32, 32, 64, 7},
                                                            {6, 32, 32, 32, 7},
                                                            {1, 1, 1, 64, 7},
                                                            {2, 128, 4, 64, 7},
                                                            {2, 84, 6, 64, 7},
                                                            {300, 32, 32, 64, 3},
                                                            {3, 9, 7, 64, 3},
                                                            {5, 40, 33, 64, 3},
                                                            {6, 32, 32, 32, 3},
                                                            {2, 1, 1, 64, 3}}) {
    CAPTURE(batch, height, width, filters, size);
    const auto image = image_of({batch, 3, height, width}, dtype, true);
    auto weight = leaf({filters, 3, size, size}, dtype, 0.1);
    const auto w = weight.detach().to(torch::kDouble).requires_grad_(true);
    const auto expected =
        torch::conv2d(image.to(torch::kDouble), w, {}, size == 7 ? 2 : 1, size / 2);
    const auto direction = torch::randn(expected.sizes(), torch::kCUDA).to(dtype);
    const auto wanted = grad({expected}, {w}, {direction.to(torch::kDouble)})[0];
    ddp::ops::GradSlot slot{torch::full_like(weight.detach(), 7, torch::kFloat)};
    ddp::ops::add_grad_slot(weight, slot);
    for (int i = 0; i < 2; ++i) {
      const auto out = ddp::ops::stem_convolution(image, weight, StemAlgorithm::Im2col);
      CHECK(relative_error(out, expected) < tolerance(dtype));
      out.backward(direction);
    }
    const bool by_library = size == 3 && (filters != 64 || width > 32);
    CHECK(slot.written != by_library);
    const auto& sum = by_library ? weight.grad() : slot.memory;
    CHECK(relative_error(sum, 2 * wanted) < (by_library ? 2 * tolerance(dtype) : 1e-5));
    ddp::ops::remove_grad_slot(weight, slot);
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
        // The implementation by products also rounds the pooled values and float32 weights.
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
        ddp::ops::add_grad_slot(weight, weight_slot);
        ddp::ops::add_grad_slot(bias, bias_slot);
        for (int i = 0; i < 2; ++i) {
          ddp::ops::pooled_linear(x, weight, bias).backward(direction);
        }
        CHECK_FALSE(weight.grad().defined());
        CHECK(relative_error(weight_slot.memory, 2 * wanted[1]) < bound);
        CHECK(relative_error(bias_slot.memory, 2 * wanted[2]) < bound);
        ddp::ops::remove_grad_slot(weight, weight_slot);
        ddp::ops::remove_grad_slot(bias, bias_slot);
      }
    }
  }
}
