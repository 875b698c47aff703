// SPDX-License-Identifier: Apache-2.0
#include "data/images/rand_augment.hpp"

#include <torch/torch.h>

#include <array>
#include <cmath>
#include <fstream>
#include <set>
#include <sstream>

#include "data/images/batch_builders.hpp"
#include "data/images/resident_images.hpp"
#include "data/sources/image_dataset.hpp"
#include "ddp/core/error.hpp"
#include "support/catch.hpp"
#include "unit/data/data_test_support.hpp"
#include "unit/data/sources/cifar10_sample.hpp"

using data_test::contains;
using data_test::kSample;
using data_test::message_of;
using ddp::Augment;
using ddp::DataOptions;
using ddp::DevicePolicy;
using ddp::detail::AugmentOp;
using ddp::detail::AugmentStep;
using ddp::detail::ImageTransform;

namespace {

constexpr std::array<const char*, ddp::detail::kNumAugmentOps> kNames{
    "Identity", "ShearX",   "ShearY",    "TranslateX", "TranslateY", "Rotate",       "Brightness",
    "Color",    "Contrast", "Sharpness", "Posterize",  "Solarize",   "AutoContrast", "Equalize"};

AugmentOp op_named(const std::string& name) {
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  REQUIRE(found != kNames.end());
  return static_cast<AugmentOp>(found - kNames.begin());
}

std::vector<uint8_t> bytes_of_hex(const std::string& text) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    bytes.push_back(static_cast<uint8_t>(std::stoi(text.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

/// The rows of tests/golden/rand_augment_golden.csv: make_rand_augment_golden.py describes them.
struct GoldenRow {
  std::string name, kind, magnitude, text;
};
std::vector<GoldenRow> golden_rows() {
  std::ifstream file(DDP_SOURCE_DIR "/tests/golden/rand_augment_golden.csv");
  std::vector<GoldenRow> rows;
  for (std::string line; std::getline(file, line);) {
    std::istringstream in(line);
    GoldenRow row;
    std::getline(in, row.name, ',');
    std::getline(in, row.kind, ',');
    std::getline(in, row.magnitude, ',');
    std::getline(in, row.text);
    rows.push_back(row);
  }
  return rows;
}
constexpr int kGoldenSide = 25;

/// Pixels in 0..1, so that times 255 they are bytes.
DataOptions augmenting(Augment augment) {
  return {.path = kSample,
          .num_samples = 64,
          .seed = 5,
          .augment = augment,
          .rand_augment = {.ops = 2},
          .mean = {0, 0, 0},
          .std = {1, 1, 1}};
}

torch::Tensor apply_steps(const std::vector<AugmentStep>& steps, const torch::Tensor& image) {
  torch::Tensor bytes = (image * 255).round().to(torch::kByte).permute({1, 2, 0}).contiguous();
  for (const AugmentStep& step : steps) {
    ddp::detail::apply_augment_step(step, static_cast<int>(bytes.size(0)),
                                    bytes.mutable_data_ptr<uint8_t>());
  }
  return bytes.permute({2, 0, 1}).to(torch::kFloat) / 255.0f;
}

}  // namespace

TEST_CASE("RandAugment's operations have torchvision's bytes", "[rand_augment]") {
  const auto rows = golden_rows();
  REQUIRE(rows.size() == 55);
  const auto image = bytes_of_hex(rows.front().text);
  REQUIRE(image.size() == kGoldenSide * kGoldenSide * 3);
  std::set<AugmentOp> tested;
  for (const GoldenRow& row : rows) {
    if (row.kind != "result") {
      continue;
    }
    auto made = image;
    const AugmentOp op = op_named(row.name);
    ddp::detail::apply_augment_step({op, std::stod(row.magnitude)}, kGoldenSide, made.data());
    CAPTURE(row.name, row.magnitude);
    CHECK(made == bytes_of_hex(row.text));
    tested.insert(op);
  }
  CHECK(tested.size() == ddp::detail::kNumAugmentOps);
}

TEST_CASE("RandAugment's magnitudes are torchvision's", "[rand_augment]") {
  std::set<AugmentOp> tested;
  for (const GoldenRow& row : golden_rows()) {
    if (row.kind != "magnitudes") {
      continue;
    }
    const AugmentOp op = op_named(row.name);
    std::istringstream values(row.text);
    for (int bin = 0; bin < ddp::detail::kNumMagnitudes; ++bin) {
      CAPTURE(row.name, bin);
      double expected = -1;
      REQUIRE(values >> expected);
      CHECK(ddp::detail::magnitude_of(op, bin, kGoldenSide) == expected);
    }
    tested.insert(op);
  }
  CHECK(tested.size() == 11);  // the others have none
}

TEST_CASE("RandAugment draws all operations equally often, with both signs", "[rand_augment]") {
  const int n = 14000;
  std::array<int, ddp::detail::kNumAugmentOps> counts{}, negative{};
  int equal = 0;
  ddp::SampleRng rng(1, 0, 0);
  for (int i = 0; i < n; ++i) {
    const auto steps = ddp::detail::draw_rand_augment(rng, 2, 12, 224);
    REQUIRE(steps.size() == 2);
    for (const AugmentStep& step : steps) {
      const auto op = static_cast<size_t>(step.op);
      ++counts.at(op);
      negative.at(op) += step.magnitude < 0;
      REQUIRE(std::abs(step.magnitude) == ddp::detail::magnitude_of(step.op, 12, 224));
    }
    equal += steps[0].op == steps[1].op;
  }
  for (size_t op = 0; op < kNames.size(); ++op) {
    CAPTURE(kNames[op]);
    CHECK(std::abs(counts[op] - 2000) < 5 * 43);  // five standard deviations, sqrt(n p (1 - p))
    const bool has_sign = op >= 1 && op <= 9;     // ShearX to Sharpness
    CHECK(std::abs(negative[op] - (has_sign ? 1000 : 0)) < (has_sign ? 5 * 23 : 1));
  }
  CHECK(std::abs(equal - n / 14) < 5 * 31);
}

TEST_CASE("RandAugment changes only with seed, epoch and index", "[rand_augment]") {
  DataOptions options = augmenting(Augment::PadCrop);
  options = ddp::detail::resolve_data_options(options);
  const ImageTransform transform(options, /*train=*/true), same(options, /*train=*/true);
  options.seed = 6;
  const ImageTransform other_seed(options, /*train=*/true);
  const auto draws = [](const ImageTransform& from, uint64_t epoch, uint64_t index) {
    std::vector<double> values;
    for (const AugmentStep& step : from.draw_augment_steps(epoch, index)) {
      values.push_back(static_cast<double>(step.op));
      values.push_back(step.magnitude);
    }
    return values;
  };
  int same_epoch = 0, same_index = 0, same_seed = 0;
  for (uint64_t i = 0; i < 500; ++i) {
    const auto drawn = draws(transform, 1, i);
    REQUIRE(drawn == draws(same, 1, i));
    same_epoch += drawn == draws(transform, 2, i);
    same_index += drawn == draws(transform, 1, i + 1);
    same_seed += drawn == draws(other_seed, 1, i);
  }
  // Two operations are equal by chance with probability ((5 + 9 / 2) / 14^2)^2 = 1 / 426.
  CHECK(same_epoch < 10);
  CHECK(same_index < 10);
  CHECK(same_seed < 10);
  CHECK(ImageTransform(options, /*train=*/false).draw_augment_steps(1, 0).empty());
}

TEST_CASE("RandAugment sees the cropped and flipped bytes, before normalisation",
          "[rand_augment]") {
  const int64_t cutout = GENERATE(0, 8);
  const bool channels_last = GENERATE(false, true);
  DataOptions options = augmenting(Augment::PadCrop);
  options.cutout = cutout;
  options.channels_last = channels_last;
  DataOptions plain_options = options;
  plain_options.rand_augment.ops = 0;
  plain_options.cutout = 0;
  const auto augmented = ddp::make_dataset(options), plain = ddp::make_dataset(plain_options);
  const ImageTransform& transform = ddp::detail::as_images(*augmented)->transform();
  int changed = 0;
  for (int64_t i = 0; i < 64; ++i) {
    const auto image = plain->get_for_epoch(i, 3).data;
    const auto steps = transform.draw_augment_steps(3, static_cast<uint64_t>(i));
    REQUIRE(steps.size() == 2);
    auto expected = apply_steps(steps, image);
    changed += !torch::equal(expected, image);
    if (cutout > 0) {
      ddp::SampleRng rng(5, 3, static_cast<uint64_t>(i));
      const auto crop = ddp::draw_pad_crop(rng, 32, 4);
      const auto cut = [](int centre) {
        return torch::indexing::Slice(std::max(centre - 4, 0), centre + 4);
      };
      expected.index_put_({torch::indexing::Slice(), cut(crop.cutout_y), cut(crop.cutout_x)}, 0);
    }
    REQUIRE(torch::equal(augmented->get_for_epoch(i, 3).data, expected));
  }
  CHECK(changed > 50);
}

TEST_CASE("RandAugment of resized crops uses bytes rounded as Pillow rounds", "[rand_augment]") {
  const auto options = ddp::detail::resolve_data_options(augmenting(Augment::RandomResizedCrop));
  const ImageTransform transform(options, /*train=*/true);
  const int width = 90, height = 70, side = transform.image_size();
  torch::manual_seed(1);
  const auto pixels = torch::randint(256, {height, width, 3}, torch::kByte);
  const ddp::detail::ImageView image{pixels.const_data_ptr<uint8_t>(), width, height};
  int flips = 0;
  for (uint64_t i = 0; i < 30; ++i) {
    const auto plan = transform.plan(width, height, 2, i, /*largest_denominator=*/1);
    REQUIRE(plan.rand_augment.size() == 2);
    auto resized = torch::empty({side, side, 3}, torch::kByte);
    ddp::detail::resample_bytes(image, plan.columns, plan.rows,
                                resized.mutable_data_ptr<uint8_t>());
    flips += plan.flip;
    const auto shown = (plan.flip ? resized.flip(1) : resized).permute({2, 0, 1}).to(torch::kFloat);
    auto made = torch::empty({3, side, side});
    transform.apply(image, plan, made.mutable_data_ptr<float>());
    REQUIRE(torch::equal(made, apply_steps(plan.rand_augment, shown / 255.0f)));
  }
  CHECK(flips > 5);
}

TEST_CASE("evaluation images are not augmented", "[rand_augment]") {
  const DataOptions options = augmenting(Augment::PadCrop);
  DataOptions plain = options;
  plain.rand_augment.ops = 0;
  const auto with = ddp::make_dataset(options, ddp::Split::Test);
  const auto without = ddp::make_dataset(plain, ddp::Split::Test);
  for (int64_t i = 0; i < 20; ++i) {
    REQUIRE(torch::equal(with->get(i).data, without->get(i).data));
  }
}

TEST_CASE("settings that RandAugment cannot obey are refused", "[rand_augment]") {
  const auto refusal = [](const auto& change) {
    DataOptions options = augmenting(Augment::PadCrop);
    change(options);
    return message_of<ddp::SettingsError>([&] { ddp::make_dataset(options); });
  };
  CHECK(contains(refusal([](DataOptions& o) { o.augment = Augment::None; }),
                 "data.rand_augment_ops=2 contradicts data.augment=none"));
  CHECK(contains(refusal([](DataOptions& o) { o.format = ddp::DataFormat::Synthetic; }),
                 "data.format=synthetic generates floats; fix: set data.rand_augment_ops=0"));
  for (const int64_t magnitude : {-1, 31}) {
    CHECK(contains(refusal([&](DataOptions& o) { o.rand_augment.magnitude = magnitude; }),
                   "data.rand_augment_magnitude=" + std::to_string(magnitude) +
                       " must be from 0 to 30; fix: set 9"));
  }
  for (const int64_t ops : {-1, 15}) {
    CHECK(contains(refusal([&](DataOptions& o) { o.rand_augment.ops = ops; }),
                   "data.rand_augment_ops=" + std::to_string(ops) + " must be from 0 to 14"));
  }
}

#ifdef DDP_HAS_CUDA
TEST_CASE("a GPU makes no batches with RandAugment", "[rand_augment]") {
  const at::Device gpu(at::kCUDA, 0);
  DataOptions options = augmenting(Augment::PadCrop);
  const std::shared_ptr<const ddp::Dataset> kept = ddp::make_dataset(options);
  CHECK_FALSE(ddp::detail::keeps_images_on_device(*kept, gpu, {}));
  CHECK(contains(message_of<ddp::SettingsError>([&] {
                   ddp::detail::keeps_images_on_device(*kept, gpu,
                                                       {.device_resident = DevicePolicy::On});
                 }),
                 "loader.device_resident=on is impossible: data.rand_augment_ops=2 runs on the "
                 "CPU; fix: set loader.device_resident=auto, or data.rand_augment_ops=0"));
  options.augment = Augment::RandomResizedCrop;
  options.cache = ddp::CachePolicy::Off;
  const std::shared_ptr<const ddp::Dataset> files = ddp::make_dataset(options);
  const auto builder = [&](DevicePolicy policy) {
    return ddp::detail::make_device_builder(files, gpu, {.device_transform = policy}, 2, 8);
  };
  CHECK(builder(DevicePolicy::Auto) == nullptr);
  CHECK(contains(message_of<ddp::SettingsError>([&] { builder(DevicePolicy::On); }),
                 "loader.device_transform=on is impossible: data.rand_augment_ops=2 runs on the "
                 "CPU; fix: set loader.device_transform=auto, or data.rand_augment_ops=0"));
}
#endif
