// SPDX-License-Identifier: Apache-2.0
// The ops of convolutional networks compared with LibTorch's results, on the CPU.
#include <torch/torch.h>

#include <limits>

#include "ddp/ops/language.hpp"
#include "ops/shared/grad_slot.hpp"
#include "ops/vision/convolution_algorithms.hpp"
#include "support/catch.hpp"

using ddp::ops::Conv2dAlgorithm;
using ddp::ops::StemAlgorithm;
using torch::autograd::grad;

namespace {

torch::Tensor leaf(torch::IntArrayRef shape) {
  return torch::randn(shape, torch::kDouble).requires_grad_(true);
}

/// Equal up to the order of float64 sums.
bool same(const torch::Tensor& a, const torch::Tensor& b) {
  return a.sizes() == b.sizes() && torch::allclose(a, b, 1e-12, 1e-12);
}

}  // namespace

TEST_CASE("the stem's rearrangements equal its convolution, forward and backward") {
  torch::manual_seed(1);
  for (const auto& [height, width] : {std::pair{32, 32}, {16, 22}, {31, 17}, {7, 8}}) {
    const auto image = torch::randn({2, 3, height, width}, torch::kDouble);
    auto weight = leaf({5, 3, 7, 7});
    const auto expected = torch::conv2d(image, weight, {}, 2, 3);
    const auto direction = torch::randn_like(expected);
    const auto wanted = grad({expected}, {weight}, {direction})[0];
    for (const auto algorithm : {StemAlgorithm::SpaceToDepth, StemAlgorithm::Im2col}) {
      CAPTURE(height, width, static_cast<int>(algorithm));
      const auto out = ddp::ops::stem_convolution(image, weight, algorithm);
      CHECK(same(out, expected));
      CHECK(out.is_contiguous(torch::MemoryFormat::ChannelsLast));
      CHECK(same(grad({out}, {weight}, {direction})[0], wanted));
      const auto last = image.contiguous(torch::MemoryFormat::ChannelsLast);
      CHECK(torch::equal(ddp::ops::stem_convolution(last, weight, algorithm), out));
    }
    const auto cells = ddp::ops::stem_space_to_depth(image, torch::kDouble);
    CHECK(same(ddp::ops::stem_convolution(cells, weight), expected));
    CHECK(torch::equal(ddp::ops::stem_convolution(image, weight), expected));
  }
}

TEST_CASE("the 3x3 stem is its convolution; space-to-depth of it is refused") {
  torch::manual_seed(13);
  const auto image = torch::randn({2, 3, 9, 8}, torch::kDouble);
  const auto weight = leaf({64, 3, 3, 3});
  const auto expected = torch::conv2d(image, weight, {}, 1, 1);
  for (const auto algorithm :
       {StemAlgorithm::Auto, StemAlgorithm::Library, StemAlgorithm::Im2col}) {
    const auto out = ddp::ops::stem_convolution(image, weight, algorithm);
    CHECK(torch::equal(out, expected));
    CHECK(same(grad({out.sum()}, {weight})[0],
               grad({torch::conv2d(image, weight, {}, 1, 1).sum()}, {weight})[0]));
  }
  CHECK_THROWS_WITH(ddp::ops::stem_convolution(image, weight, StemAlgorithm::SpaceToDepth),
                    Catch::Contains("[64, 3, 3, 3]"));
  CHECK_THROWS_WITH(ddp::ops::stem_convolution(torch::zeros({2, 16, 8, 8}), weight),
                    Catch::Contains("[2, 16, 8, 8]"));
}

TEST_CASE("the stem takes bytes as they are, and gives an image its gradient") {
  torch::manual_seed(2);
  const auto bytes = torch::randint(256, {2, 3, 12, 12}, torch::kByte);
  const auto weight = leaf({4, 3, 7, 7});
  const auto expected = torch::conv2d(bytes.to(torch::kDouble), weight, {}, 2, 3);
  CHECK(same(ddp::ops::stem_convolution(bytes, weight, StemAlgorithm::SpaceToDepth), expected));
  CHECK(same(ddp::ops::stem_convolution(bytes, weight, StemAlgorithm::Im2col), expected));
  const auto image = leaf({2, 3, 12, 12});
  const auto out = ddp::ops::stem_convolution(image, weight, StemAlgorithm::Im2col);
  CHECK(grad({out.sum()}, {image})[0].abs().max().item<double>() > 0);
  CHECK_THROWS_WITH(ddp::ops::stem_convolution(torch::zeros({2, 4, 8, 8}), weight),
                    Catch::Contains("[2, 4, 8, 8]"));
  CHECK_THROWS_WITH(ddp::ops::stem_space_to_depth(image, torch::kDouble),
                    Catch::Contains("requires a gradient"));
  CHECK_THROWS_WITH(ddp::ops::stem_convolution(leaf({2, 16, 9, 9}), weight),
                    Catch::Contains("16 channels"));
}

TEST_CASE("the stem writes its weight's gradient into a grad slot, and adds to what is there") {
  torch::manual_seed(3);
  const auto image = torch::randn({2, 3, 16, 16}, torch::kDouble);
  auto weight = leaf({4, 3, 7, 7});
  const auto wanted = grad({torch::conv2d(image, weight, {}, 2, 3).sum()}, {weight})[0];
  for (const auto algorithm : {StemAlgorithm::SpaceToDepth, StemAlgorithm::Im2col}) {
    ddp::ops::GradSlot slot{torch::full_like(weight.detach(), 7)};
    ddp::ops::add_grad_slot(weight, slot);
    ddp::ops::stem_convolution(image, weight, algorithm).sum().backward();
    CHECK(slot.written);
    CHECK_FALSE(weight.grad().defined());
    CHECK(same(slot.memory, wanted));
    ddp::ops::stem_convolution(image, weight, algorithm).sum().backward();
    CHECK(same(slot.memory, 2 * wanted));
    ddp::ops::remove_grad_slot(weight, slot);
  }
}

TEST_CASE("cross_entropy is PyTorch's, and counts the right answers") {
  torch::manual_seed(4);
  const auto logits = leaf({9, 6});
  auto labels = logits.detach().argmax(1);
  labels[0] = -100;
  labels[3] = (labels[3].item<int64_t>() + 1) % 6;
  labels[5] = (labels[5].item<int64_t>() + 2) % 6;
  for (const double smoothing : {0.0, 0.1, 1.0}) {
    const auto result = ddp::ops::cross_entropy(logits, labels, {.label_smoothing = smoothing});
    const auto expected =
        torch::cross_entropy_loss(logits, labels, {}, at::Reduction::Mean, -100, smoothing);
    CHECK(same(result.loss, expected));
    CHECK(result.num_correct.item<int64_t>() == 6);
    CHECK(same(grad({result.loss}, {logits})[0], grad({expected}, {logits})[0]));
  }
  labels[0] = 0;
  const auto ignored = labels[3].item<int64_t>();
  const auto counted = labels.ne(ignored);
  const auto others = ddp::ops::cross_entropy(logits, labels, {.ignore_index = ignored});
  CHECK(same(others.loss,
             torch::cross_entropy_loss(logits.index({counted}), labels.index({counted}))));
  CHECK(others.num_correct.item<int64_t>() ==
        logits.argmax(1).eq(labels).logical_and_(counted).sum().item<int64_t>());
  CHECK_THROWS_WITH(ddp::ops::cross_entropy(logits, labels, {.label_smoothing = 1.5}),
                    Catch::Contains("1.5"));
}

TEST_CASE("a row without a largest finite logit is never right") {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const auto logits = torch::tensor({{kNan, kNan, kNan},
                                     {-kInf, -kInf, -kInf},
                                     {kNan, 1.F, 2.F},
                                     {3.F, 1.F, 2.F},
                                     {-kInf, 1.F, 2.F},
                                     {kInf, 1.F, 2.F}});
  for (int64_t label = 0; label < 3; ++label) {
    CAPTURE(label);
    const auto right = ddp::ops::cross_entropy(logits, torch::full({6}, label)).num_correct;
    CHECK(right.item<int64_t>() == (label == 1 ? 0 : 1));
  }
}

TEST_CASE("ops of convolutional networks name what lies on another device") {
  const auto x = torch::zeros({2, 3, 8, 8}), rows = torch::zeros({2, 3});
  const auto meta = torch::TensorOptions(torch::kMeta);
  using Catch::Contains;
  CHECK_THROWS_WITH(ddp::ops::conv2d(x, torch::zeros({4, 3, 1, 1}, meta), 1, 0),
                    Contains("conv2d: weight is on meta"));
  CHECK_THROWS_WITH(ddp::ops::stem_convolution(x, torch::zeros({4, 3, 7, 7}, meta)),
                    Contains("stem_convolution: weight is on meta"));
  CHECK_THROWS_WITH(ddp::ops::pooled_linear(x, torch::zeros({4, 3}), torch::zeros({4}, meta)),
                    Contains("pooled_linear: bias is on meta"));
  CHECK_THROWS_WITH(ddp::ops::cross_entropy(rows, torch::zeros({2}, meta.dtype(torch::kLong))),
                    Contains("cross_entropy: labels is on meta"));
}

TEST_CASE("pooled_linear is the mean over pixels and a linear layer") {
  torch::manual_seed(5);
  const auto x = leaf({3, 8, 2, 4}), weight = leaf({5, 8}), bias = leaf({5});
  const auto expected = torch::linear(x.mean({2, 3}), weight, bias);
  const auto out = ddp::ops::pooled_linear(x, weight, bias);
  CHECK(same(out, expected));
  const auto direction = torch::randn_like(expected);
  const auto grads = grad({out}, {x, weight, bias}, {direction});
  const auto wanted = grad({expected}, {x, weight, bias}, {direction});
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(same(grads[i], wanted[i]));
  }
}

namespace {

struct ConvCase {
  int64_t kernel, stride, height, width;
};

// All forms of a dense product.
const std::vector<ConvCase> kProducts = {{1, 1, 5, 3}, {1, 1, 1, 1}, {1, 2, 2, 2}, {1, 2, 1, 1},
                                         {3, 1, 1, 1}, {3, 2, 1, 1}, {3, 1, 2, 2}, {3, 2, 2, 2}};

}  // namespace

TEST_CASE("convolutions as dense products equal conv2d, forward and backward") {
  torch::manual_seed(6);
  for (const auto& c : kProducts) {
    for (const bool last : {false, true}) {
      CAPTURE(c.kernel, c.stride, c.height, c.width, last);
      auto x = leaf({3, 8, c.height, c.width}), weight = leaf({5, 8, c.kernel, c.kernel});
      if (last) {
        x = x.detach().contiguous(torch::MemoryFormat::ChannelsLast).requires_grad_(true);
        weight = weight.detach().contiguous(torch::MemoryFormat::ChannelsLast).requires_grad_(true);
      }
      const int64_t padding = c.kernel / 2;
      const auto expected = torch::conv2d(x, weight, {}, c.stride, padding);
      const auto out = ddp::ops::conv2d(x, weight, c.stride, padding, Conv2dAlgorithm::Product);
      CHECK(same(out, expected));
      const auto direction = torch::randn_like(expected);
      const auto grads = grad({out}, {x, weight}, {direction}, /*retain_graph=*/true);
      const auto wanted = grad({expected}, {x, weight}, {direction});
      CHECK(same(grads[0], wanted[0]));
      CHECK(same(grads[1], wanted[1]));

      // The first backward overwrites a slot (also taps that no output uses), later ones add to it.
      ddp::ops::GradSlot slot{torch::full_like(weight.detach(), 7)};
      ddp::ops::add_grad_slot(weight, slot);
      out.backward(direction, /*retain_graph=*/true);
      CHECK_FALSE(weight.grad().defined());
      CHECK(same(slot.memory, wanted[1]));
      out.backward(direction);
      CHECK(same(slot.memory, 2 * wanted[1]));
      ddp::ops::remove_grad_slot(weight, slot);
    }
  }
}

TEST_CASE("convolutions take an empty batch") {
  for (const auto& c : kProducts) {
    CAPTURE(c.kernel, c.stride, c.height, c.width);
    const auto x = leaf({0, 8, c.height, c.width}), weight = leaf({5, 8, c.kernel, c.kernel});
    for (const auto algorithm : {Conv2dAlgorithm::Auto, Conv2dAlgorithm::Product}) {
      const auto out = ddp::ops::conv2d(x, weight, c.stride, c.kernel / 2, algorithm);
      CHECK(out.sizes() == torch::conv2d(x, weight, {}, c.stride, c.kernel / 2).sizes());
      const auto grads = grad({out.sum()}, {x, weight});
      CHECK(grads[0].sizes() == x.sizes());
      CHECK(torch::equal(grads[1], torch::zeros_like(weight)));
    }
  }
}

TEST_CASE("conv2d makes only the gradients that are wanted, and takes the library elsewhere") {
  torch::manual_seed(7);
  const auto x = torch::randn({3, 8, 2, 2}, torch::kDouble), weight = leaf({5, 8, 3, 3});
  const auto expected = torch::conv2d(x, weight, {}, 1, 1);
  const auto out = ddp::ops::conv2d(x, weight, 1, 1, Conv2dAlgorithm::Product);
  CHECK(same(grad({out.sum()}, {weight})[0], grad({expected.sum()}, {weight})[0]));
  const auto frozen = weight.detach(), moving = leaf({3, 8, 2, 2});
  const auto dense = ddp::ops::conv2d(moving, frozen, 1, 1, Conv2dAlgorithm::Product);
  CHECK(same(grad({dense.sum()}, {moving})[0],
             grad({torch::conv2d(moving, frozen, {}, 1, 1).sum()}, {moving})[0]));
  const auto larger = torch::randn({2, 8, 7, 5}, torch::kDouble);
  CHECK(torch::equal(ddp::ops::conv2d(larger, weight, 2, 1),
                     torch::conv2d(larger, weight, {}, 2, 1)));
  CHECK_THROWS_WITH(ddp::ops::conv2d(larger, weight, 2, 1, Conv2dAlgorithm::Product),
                    Catch::Contains("7x5"));
  CHECK_THROWS_WITH(ddp::ops::conv2d(larger, weight, 1, 0), Catch::Contains("padding 0"));
}

TEST_CASE("autograd::grad of a weight with a grad slot returns its gradient and leaves the slot") {
  torch::manual_seed(14);
  auto weight = leaf({5, 8, 1, 1});
  const auto x = leaf({3, 8, 2, 2});
  const auto wanted = grad({torch::conv2d(x, weight).sum()}, {weight})[0];
  const auto loss = [&](const torch::Tensor& with) {
    return ddp::ops::conv2d(x, with, 1, 0, Conv2dAlgorithm::Product).sum();
  };
  ddp::ops::GradSlot slot{torch::full_like(weight.detach(), 7)};
  ddp::ops::add_grad_slot(weight, slot);
  CHECK(same(grad({loss(weight)}, {weight})[0], wanted));
  // Another tensor on the same memory.
  const auto alias = weight.detach().requires_grad_(true);
  loss(alias).backward();
  CHECK(same(alias.grad(), wanted));
  CHECK_FALSE(slot.written);
  CHECK(slot.memory.eq(7).all().item<bool>());
  torch::autograd::backward({loss(weight)}, {}, std::nullopt, false, /*inputs=*/{weight});
  CHECK(slot.written);
  CHECK(same(slot.memory, wanted));
  ddp::ops::remove_grad_slot(weight, slot);
}

TEST_CASE("gradients that carry no graph refuse create_graph") {
  const auto refuses = [](const char* op, const torch::Tensor& out, const torch::Tensor& input) {
    CAPTURE(op);
    CHECK_THROWS_WITH(grad({out.sum()}, {input}, {}, true, /*create_graph=*/true),
                      Catch::StartsWith(op) && Catch::Contains("create_graph"));
  };
  const auto x = leaf({3, 8, 2, 2}), weight = leaf({5, 8, 1, 1});
  refuses("conv2d", ddp::ops::conv2d(x, weight, 1, 0, Conv2dAlgorithm::Product), x);
  const auto image = torch::randn({2, 3, 12, 12}, torch::kDouble), stem = leaf({4, 3, 7, 7});
  for (const auto algorithm : {StemAlgorithm::SpaceToDepth, StemAlgorithm::Im2col}) {
    refuses("stem_convolution", ddp::ops::stem_convolution(image, stem, algorithm), stem);
  }
  const auto rows = leaf({6, 8}), base = leaf({5, 8}), a = leaf({2, 8}), b = leaf({5, 2});
  refuses("lora_linear", ddp::ops::lora_linear(rows, base.detach(), a, b), rows);
  const auto labels = torch::zeros({6}, torch::kLong);
  refuses("linear_cross_entropy", ddp::ops::linear_cross_entropy(rows, base, labels).loss_sum,
          rows);
  const auto gate_up = leaf({6, 8});
  refuses("swiglu", ddp::ops::swiglu(gate_up), gate_up);
  const auto sine = [](const std::vector<torch::Tensor>& in) { return in[0].sin(); };
  refuses("checkpoint", ddp::ops::checkpoint(sine, {rows}), rows);
}
