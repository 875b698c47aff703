// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <cmath>

#include "data/images/augmentation.hpp"
#include "data/sources/image_dataset.hpp"
#include "ddp/data/dataset.hpp"
#include "support/catch.hpp"
#include "unit/data/sources/cifar10_sample.hpp"

using data_test::kSample;
using ddp::Augment;
using ddp::DataOptions;
using ddp::make_dataset;

namespace {

// Pad-crop, flip and cutout by definition, with LibTorch's ops.
torch::Tensor pad_crop_reference(const torch::Tensor& image, const ddp::PadCrop& crop, int64_t pad,
                                 int64_t cutout, const torch::Tensor& black) {
  const int64_t side = image.size(1);
  torch::Tensor padded = black.view({3, 1, 1}).expand({3, side + 2 * pad, side + 2 * pad}).clone();
  padded.slice(1, pad, pad + side).slice(2, pad, pad + side).copy_(image);
  torch::Tensor out = padded.slice(1, crop.dy + pad, crop.dy + pad + side)
                          .slice(2, crop.dx + pad, crop.dx + pad + side)
                          .clone();
  if (crop.flip) {
    out = out.flip(2);
  }
  if (cutout > 0) {
    const int64_t top = crop.cutout_y - cutout / 2, left = crop.cutout_x - cutout / 2;
    out.slice(1, std::max<int64_t>(top, 0), std::max<int64_t>(top + cutout, 0))
        .slice(2, std::max<int64_t>(left, 0), std::max<int64_t>(left + cutout, 0))
        .zero_();
  }
  return out;
}

}  // namespace

TEST_CASE("pad-crop, flip and cutout equal LibTorch's ops for the same draws", "[augment]") {
  const int64_t cutout = GENERATE(0, 8);
  const bool channels_last = GENERATE(false, true);
  const DataOptions options{.path = kSample,
                            .num_samples = 64,
                            .seed = 5,
                            .augment = Augment::PadCrop,
                            .cutout = cutout,
                            .channels_last = channels_last};
  const auto augmented = make_dataset(options);
  DataOptions plain_options = options;
  plain_options.augment = Augment::None;
  const auto plain = make_dataset(plain_options);
  const auto resolved = ddp::detail::resolve_data_options(options);
  const auto black =
      torch::tensor({(0.0f / 255.0f - float(resolved.mean[0])) / float(resolved.std[0]),
                     (0.0f / 255.0f - float(resolved.mean[1])) / float(resolved.std[1]),
                     (0.0f / 255.0f - float(resolved.mean[2])) / float(resolved.std[2])});
  for (int64_t epoch : {0, 3}) {
    for (int64_t i = 0; i < 64; ++i) {
      ddp::SampleRng rng(5, static_cast<uint64_t>(epoch), static_cast<uint64_t>(i));
      const auto crop = ddp::draw_pad_crop(rng, 32, 4);
      const auto expected = pad_crop_reference(plain->get(i).data, crop, 4, cutout, black);
      const auto data = augmented->get_for_epoch(i, epoch).data;
      REQUIRE(torch::equal(data, expected));
      REQUIRE(data.stride(0) == (channels_last ? 1 : 32 * 32));
    }
  }
}

TEST_CASE("normalisation equals torchvision's", "[augment]") {
  const DataOptions raw{
      .path = kSample, .augment = Augment::None, .mean = {0, 0, 0}, .std = {1, 1, 1}};
  const auto pixels = make_dataset(raw)->get(3).data;
  const auto mean = torch::tensor({0.4914f, 0.4822f, 0.4465f}).view({3, 1, 1});
  const auto std = torch::tensor({0.2470f, 0.2435f, 0.2616f}).view({3, 1, 1});
  const auto normalised = make_dataset({.path = kSample, .augment = Augment::None})->get(3).data;
  REQUIRE(torch::equal(normalised, (pixels - mean) / std));
  REQUIRE(pixels.max().item<float>() <= 1);
  REQUIRE(pixels.max().item<float>() > 0.5);
}

TEST_CASE("crops and flips are uniform", "[augment]") {
  std::vector<int> shift(9, 0);
  int flips = 0;
  const int n = 20000;
  for (int i = 0; i < n; ++i) {
    ddp::SampleRng rng(1, 0, static_cast<uint64_t>(i));
    const auto crop = ddp::draw_pad_crop(rng, 32, 4);
    REQUIRE((crop.dx >= -4 && crop.dx <= 4 && crop.dy >= -4 && crop.dy <= 4));
    ++shift[static_cast<size_t>(crop.dx + 4)];
    flips += crop.flip;
  }
  for (int count : shift) {
    REQUIRE(std::abs(count - n / 9) < 5 * 45);  // five standard deviations, sqrt(n p (1 - p))
  }
  REQUIRE(std::abs(flips - n / 2) < 5 * 71);
}

TEST_CASE("random resized crops lie in the image and have torchvision's area and ratio",
          "[augment]") {
  const int n = 20000;
  double scale = 0, log_ratio = 0;
  int left = 0, right = 0;
  for (int i = 0; i < n; ++i) {
    ddp::SampleRng rng(2, 1, static_cast<uint64_t>(i));
    const auto box = ddp::draw_random_resized_crop(rng, 500, 375, 224, {}).box;
    REQUIRE((box.x >= 0 && box.y >= 0 && box.width > 0 && box.height > 0));
    REQUIRE((box.x + box.width <= 500 && box.y + box.height <= 375));
    scale += double(box.width) * box.height / (500.0 * 375.0);
    log_ratio += std::log(double(box.width) / box.height);
    left += box.x;
    right += 500 - box.x - box.width;
  }
  // Means of 200,000 draws of torchvision's formula in Python. Its boxes that do not fit are
  // redrawn, which favours small and wide ones. The tolerance is five standard errors of n draws;
  // one draw deviates by 0.22 and 0.165.
  REQUIRE(std::abs(scale / n - 0.4328) < 0.0085);
  REQUIRE(std::abs(log_ratio / n - 0.0309) < 0.0060);
  REQUIRE(std::abs(double(left) / right - 1) < 0.03);
}

TEST_CASE("an image that no try fits gives the largest centre box", "[augment]") {
  ddp::SampleRng rng(0, 0, 0);
  const auto box = ddp::draw_random_resized_crop(rng, 2000, 10, 224, {.min_scale = 0.9}).box;
  REQUIRE(box.height == 10);
  REQUIRE(box.width == 13);
  REQUIRE(box.x == (2000 - 13) / 2);
}

TEST_CASE("the box in an image of one row or one column has a pixel", "[augment]") {
  for (const auto& [low, high] : {std::pair{3.0, 4.0}, std::pair{0.2, 0.3}}) {
    const ddp::RandomResizedCropBounds bounds{.min_log_ratio = std::log(low),
                                              .max_log_ratio = std::log(high),
                                              .min_ratio = low,
                                              .max_ratio = high};
    for (const auto& [width, height] :
         {std::pair{1, 1}, std::pair{1, 2}, std::pair{1, 90}, std::pair{2, 1}, std::pair{90, 1}}) {
      for (uint64_t i = 0; i < 20; ++i) {
        ddp::SampleRng rng(i, 0, 0);
        const auto box = ddp::draw_random_resized_crop(rng, width, height, 24, bounds).box;
        CAPTURE(low, width, height, box.x, box.y, box.width, box.height);
        REQUIRE(box.width >= 1);
        REQUIRE(box.height >= 1);
        REQUIRE((box.x >= 0 && box.x + box.width <= width));
        REQUIRE((box.y >= 0 && box.y + box.height <= height));
      }
    }
  }
}

TEST_CASE("portable_exp equals the exponential", "[augment]") {
  for (double x = -3; x <= 3; x += 0.01) {
    REQUIRE(ddp::detail::portable_exp(x) == Approx(std::exp(x)).epsilon(1e-13));
  }
}

TEST_CASE("augmentation changes only with epoch and seed", "[augment]") {
  const auto augment = GENERATE(Augment::PadCrop, Augment::RandomResizedCrop);
  const DataOptions options{.path = kSample, .num_samples = 40, .augment = augment};
  const auto dataset = make_dataset(options);
  DataOptions other = options;
  other.seed = 1;
  const auto other_seed = make_dataset(other);
  int same_epoch = 0, same_seed = 0;
  for (int64_t i = 0; i < 40; ++i) {
    const auto data = dataset->get_for_epoch(i, 1).data;
    REQUIRE(torch::equal(data, dataset->get_for_epoch(i, 1).data));
    same_epoch += torch::equal(data, dataset->get_for_epoch(i, 2).data);
    same_seed += torch::equal(data, other_seed->get_for_epoch(i, 1).data);
  }
  REQUIRE(same_epoch <= 3);  // 1 of 162 pad-crops is equal by chance
  REQUIRE(same_seed <= 3);
}

TEST_CASE("synthetic images depend only on seed and index and show their class", "[dataset]") {
  const DataOptions options{
      .format = ddp::DataFormat::Synthetic, .image_size = 24, .num_samples = 200};
  const auto dataset = make_dataset(options);
  DataOptions last = options;
  last.channels_last = true;
  const auto channels_last = make_dataset(last);
  std::vector<torch::Tensor> sum(10), sum_other(10);
  for (int64_t i = 0; i < 200; ++i) {
    const auto example = dataset->get(i);
    REQUIRE(torch::equal(example.data, channels_last->get(i).data));
    auto& target = (i < 100 ? sum : sum_other)[static_cast<size_t>(example.target.item<int64_t>())];
    target = target.defined() ? target + example.data : example.data.clone();
  }
  // The mean image of a class is the same in both halves, unlike the noise of single images.
  int agree = 0, classes = 0;
  for (size_t c = 0; c < 10; ++c) {
    if (sum[c].defined() && sum_other[c].defined()) {
      ++classes;
      const auto a = sum[c].flatten(), b = sum_other[c].flatten();
      agree += (a.dot(b) / (a.norm() * b.norm())).item<float>() > 0.5;
    }
  }
  REQUIRE(classes >= 8);
  REQUIRE(agree == classes);
  REQUIRE_FALSE(
      torch::equal(make_dataset(options, ddp::Split::Test)->get(0).data, dataset->get(0).data));
}
