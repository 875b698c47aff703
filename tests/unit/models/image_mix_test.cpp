// SPDX-License-Identifier: Apache-2.0
#include "images/image_mix.hpp"

#include <torch/torch.h>

#include <array>
#include <cmath>

#include "ddp/core/error.hpp"
#include "ddp/train/config.hpp"
#include "images/image_task.hpp"
#include "images/model_options.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"

using testing::message_of;

TEST_CASE("mixup weights follow Beta(alpha, alpha) and repeat for the same draw") {
  for (const double alpha : {0.2, 1.0, 2.0}) {
    INFO("alpha " << alpha);
    double sum = 0, squares = 0;
    const int count = 4000;
    for (int draw = 0; draw < count; ++draw) {
      const auto mix = examples::draw_image_mix({.mixup = alpha, .seed = 7}, draw, 32, 32);
      REQUIRE_FALSE(mix.box);
      REQUIRE(mix.weight >= 0.0);
      REQUIRE(mix.weight <= 1.0);
      sum += mix.weight;
      squares += mix.weight * mix.weight;
    }
    const double mean = sum / count;
    const double variance = squares / count - mean * mean;
    // Four standard errors of the mean; the variance is 1 / (4 (2 alpha + 1)).
    const double expected = 1.0 / (4 * (2 * alpha + 1));
    CHECK(std::abs(mean - 0.5) < 4 * std::sqrt(expected / count));
    CHECK(variance == Approx(expected).epsilon(0.1));
  }
  const auto weight = [](int64_t draw, int rank) {
    const examples::ImageMixSettings settings{.mixup = 0.4, .seed = 1, .rank = rank};
    return examples::draw_image_mix(settings, draw, 32, 32).weight;
  };
  CHECK(weight(5, 2) == weight(5, 2));
  CHECK(weight(5, 2) != weight(5, 3));
  CHECK(weight(5, 2) != weight(6, 2));
}

TEST_CASE("CutMix's box and weight are torchvision's") {
  // lambda = 0.75: half of each side, from a quarter before the centre to a quarter behind.
  const auto inside = examples::cut_mix(0.75, 20, 10, 32, 48);
  REQUIRE(inside.box);
  CHECK(inside.box->left == 8);
  CHECK(inside.box->right == 32);
  CHECK(inside.box->top == 2);
  CHECK(inside.box->bottom == 18);
  CHECK(inside.weight == 0.75);
  // Clipped at the left and the bottom: 15 x 10 pixels of 48 x 32 remain.
  const auto clipped = examples::cut_mix(0.75, 3, 30, 32, 48);
  CHECK(clipped.box->left == 0);
  CHECK(clipped.box->right == 15);
  CHECK(clipped.box->top == 22);
  CHECK(clipped.box->bottom == 32);
  CHECK(clipped.weight == 1.0 - 150.0 / 1536.0);
  // Half sides are truncated: 0.5 * sqrt(0.4) * 32 = 10.1 and * 48 = 15.2.
  const auto truncated = examples::cut_mix(0.6, 24, 16, 32, 48);
  CHECK(truncated.box->right - truncated.box->left == 30);
  CHECK(truncated.box->bottom - truncated.box->top == 20);
  CHECK(examples::cut_mix(1.0, 24, 16, 32, 48).weight == 1.0);
}

TEST_CASE("CutMix draws its centres uniformly and repeats for the same draw") {
  const int count = 4000;
  double kept = 0;
  std::array<int, 4> quadrants{};
  for (int draw = 0; draw < count; ++draw) {
    const auto mix = examples::draw_image_mix({.cutmix = 1, .seed = 7}, draw, 24, 32);
    REQUIRE(mix.box);
    REQUIRE((0 <= mix.box->left && mix.box->left <= mix.box->right && mix.box->right <= 32));
    REQUIRE((0 <= mix.box->top && mix.box->top <= mix.box->bottom && mix.box->bottom <= 24));
    kept += mix.weight;
    const bool is_right = mix.box->left + mix.box->right > 32;
    const bool is_lower = mix.box->top + mix.box->bottom > 24;
    ++quadrants[static_cast<size_t>(is_right) + 2 * static_cast<size_t>(is_lower)];
  }
  // The mean over 1,000,000 boxes by torchvision's CutMix.make_params: 0.7049. One box deviates by
  // 0.18; four standard errors. Boxes at the middle count as left and upper.
  CHECK(std::abs(kept / count - 0.7049) < 4 * 0.18 / std::sqrt(count));
  for (const int in_quadrant : quadrants) {
    CHECK(in_quadrant > 0.2 * count);
  }
  const auto box = [](int64_t draw, int rank) {
    const examples::ImageMixSettings settings{.cutmix = 1, .seed = 1, .rank = rank};
    const auto mix = examples::draw_image_mix(settings, draw, 224, 224);
    return std::array{mix.box->left, mix.box->top, mix.box->right, mix.box->bottom};
  };
  CHECK(box(5, 2) == box(5, 2));
  CHECK(box(5, 2) != box(5, 3));
  CHECK(box(5, 2) != box(6, 2));
}

TEST_CASE("with mixup and CutMix half of the batches use either") {
  const int count = 4000;
  int num_cut = 0;
  double weights = 0;
  for (int draw = 0; draw < count; ++draw) {
    const auto mix = examples::draw_image_mix({.mixup = 4, .cutmix = 1, .seed = 7}, draw, 32, 32);
    num_cut += mix.box.has_value();
    weights += mix.box ? 0 : std::abs(mix.weight - 0.5);
  }
  CHECK(std::abs(num_cut - count / 2) < 4 * 32);
  // The mean distance from 1/2 is 0.137 for mixup's alpha and would be 0.25 for CutMix's.
  CHECK(weights / (count - num_cut) < 0.16);
}

TEST_CASE("an alpha that is too large is refused") {
  for (const char* argument : {"train.mixup=4.5", "train.cutmix=5"}) {
    const char* const arguments[] = {"program", argument};
    CHECK_THAT(message_of<ddp::SettingsError>([&] {
                 ddp::Config::from_command_line(2, arguments, examples::resnet_sections());
               }),
               Catch::Contains(argument) && Catch::Contains("4"));
  }
}

TEST_CASE("mixed images come from their own places in the batch and its reverse") {
  const auto images = torch::arange(3 * 2 * 4 * 5, torch::kFloat32).view({3, 2, 4, 5});
  const auto reversed = images.flip(0);
  CHECK(torch::equal(examples::mix_images(images, {.weight = 1.0}), images));
  CHECK(torch::allclose(examples::mix_images(images, {.weight = 0.25}),
                        0.25 * images + 0.75 * reversed));
  const auto before = images.clone();
  const examples::ImageMix cut{
      .weight = 0.7, .box = examples::PixelBox{.left = 1, .top = 2, .right = 4, .bottom = 4}};
  const auto mixed = examples::mix_images(images, cut);
  CHECK(torch::equal(images, before));
  for (int64_t y = 0; y < 4; ++y) {
    for (int64_t x = 0; x < 5; ++x) {
      const auto& source = x >= 1 && x < 4 && y >= 2 ? reversed : images;
      CHECK(torch::equal(mixed.select(2, y).select(2, x), source.select(2, y).select(2, x)));
    }
  }
}

TEST_CASE("the loss of mixed images is linear in the weight") {
  const auto logits = torch::randn({3, 5});
  const auto target = torch::tensor({0, 2, 4}, torch::kInt64);
  // The same loss from the mixed distribution as a soft target.
  const double smoothing = 0.1, weight = 0.3;
  const auto one_hot = [&](const torch::Tensor& labels) {
    return torch::one_hot(labels, 5) * (1 - smoothing) + smoothing / 5;
  };
  const auto soft = weight * one_hot(target) + (1 - weight) * one_hot(target.flip(0));
  const auto expected = -(soft * torch::log_softmax(logits, 1)).sum(1).mean();
  const auto [loss, num_correct] = examples::classification_loss(
      logits, target, smoothing, torch::tensor({weight, 1 - weight}, torch::kFloat32));
  CHECK(loss.item<double>() == Approx(expected.item<double>()).epsilon(1e-5));
  CHECK(num_correct.item<int64_t>() == logits.argmax(1).eq(target.flip(0)).sum().item<int64_t>());
}

TEST_CASE("the accuracy of mixed images counts the label of the larger weight") {
  // Rows 0 and 2 predict their own labels, rows 1 and 3 those of their partners (2 and 0).
  const auto logits = torch::one_hot(torch::tensor({0, 2, 2, 0}), 5).to(torch::kFloat32);
  const auto target = torch::tensor({0, 1, 2, 3}, torch::kInt64);
  const auto hits = [&](double weight) {
    return examples::classification_loss(logits, target, 0,
                                         torch::tensor({weight, 1 - weight}, torch::kFloat32))
        .num_correct.item<int64_t>();
  };
  for (const double weight : {0.0, 0.3, 0.6, 1.0}) {
    CAPTURE(weight);
    const auto mixed =
        weight * torch::one_hot(target, 5) + (1 - weight) * torch::one_hot(target.flip(0), 5);
    // torchvision's utils.accuracy takes the largest entry of a mixed target.
    CHECK(hits(weight) == logits.argmax(1).eq(mixed.argmax(1)).sum().item<int64_t>());
  }
  CHECK(hits(0.9) == 2);
  CHECK(hits(0.1) == 2);
  const auto flipped = torch::one_hot(target.flip(0), 5).to(torch::kFloat32);
  const auto all = examples::classification_loss(flipped, target, 0, torch::tensor({0.2F, 0.8F}));
  CHECK(all.num_correct.item<int64_t>() == 4);
}
