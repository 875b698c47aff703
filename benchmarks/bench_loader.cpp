// SPDX-License-Identifier: Apache-2.0
// Rates of each stage of data loading, one number a line: what one core does, what the loader
// gives.
//
//   bench_loader [CIFAR_PATH [JPEG_FOLDER]]
//
// CIFAR_PATH: any layout of 32 px images (default: the embedded sample). JPEG_FOLDER: class folders
// of photographs, for decode and random-resized-crop at 224 px.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "data/image_source.hpp"
#include "data/image_transform.hpp"
#include "data/jpeg.hpp"
#include "ddp/data/data_loader.hpp"
#include "ddp/data/dataset.hpp"

namespace {

using Clock = std::chrono::steady_clock;

// Median rate of five rounds of at least 0.3 s each.
double images_per_second(const std::function<int64_t()>& round) {
  std::vector<double> rates;
  (void)round();
  for (int i = 0; i < 5; ++i) {
    int64_t count = 0;
    const auto begin = Clock::now();
    std::chrono::duration<double> elapsed{0};
    while (elapsed.count() < 0.3) {
      count += round();
      elapsed = Clock::now() - begin;
    }
    rates.push_back(static_cast<double>(count) / elapsed.count());
  }
  std::nth_element(rates.begin(), rates.begin() + 2, rates.end());
  return rates[2];
}

void print(const std::string& stage, double rate) {
  std::printf("%-58s %10.0f images/s %8.2f us an image\n", stage.c_str(), rate, 1e6 / rate);
  std::fflush(stdout);
}

void bench_stages(const ddp::DataOptions& options, const std::string& name) {
  const auto dataset = ddp::make_dataset(options);
  const auto layout = *dataset->layout();
  const int64_t num_values = layout.shape[0] * layout.shape[1] * layout.shape[2];
  std::vector<float> image(static_cast<size_t>(num_values));
  int64_t target = 0, next = 0;
  print(name + ", write one sample, one core", images_per_second([&] {
          for (int i = 0; i < 16; ++i, next = (next + 1) % dataset->size()) {
            dataset->write(next, 1, image.data(), &target);
          }
          return 16;
        }));
  for (int64_t num_workers : {0, 1, 2, 4, 8, 16}) {
    if (num_workers > static_cast<int64_t>(std::thread::hardware_concurrency())) {
      break;
    }
    ddp::DataLoader loader(dataset, ddp::DistributedSampler(dataset->size(), 0, 1), at::kCPU,
                           {.batch_size = 128, .num_workers = num_workers, .drop_last = true});
    print(ddp::detail::concat(name, ", loader, ", num_workers, " workers"),
          images_per_second([&] { return loader.next().size(); }));
  }
}

void bench_decode(ddp::detail::ImageSource& source, const std::string& name) {
  std::vector<uint8_t> bytes;
  ddp::detail::RgbImage image;
  int64_t next = 0;
  auto each = [&](int denominator) {
    return images_per_second([&] {
      source.read(next, bytes);
      if (denominator > 0) {
        const auto where = source.locate(next);
        (void)ddp::detail::read_jpeg_header(bytes, where, 1'000'000'000);
        ddp::detail::decode_jpeg(bytes, where, denominator, image);
      }
      next = (next + 1) % source.size();
      return 1;
    });
  };
  print(name + ", read the file, one core", each(0));
  print(name + ", read and decode, one core", each(1));
  print(name + ", read and decode at 1/2, one core", each(2));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string cifar = argc > 1 ? argv[1] : "data/cifar10-sample";
  std::printf("cores: %u\n", std::thread::hardware_concurrency());
  for (const auto& [count, name] :
       {std::pair{int64_t{50000}, "50,000"}, std::pair{int64_t{1281167}, "1,281,167"}}) {
    ddp::DistributedSampler sampler(count, 0, 8);
    int64_t epoch = 0;
    const double rate = images_per_second([&] {
      sampler.set_epoch(++epoch);
      return 1;
    });
    std::printf("sampler, permutation of %s: %.2f ms an epoch\n", name, 1e3 / rate);
  }
  if (!ddp::detail::find_tar_shards(cifar, ddp::Split::Train).empty()) {
    bench_decode(*ddp::detail::open_tar_source(cifar, ddp::Split::Train), "32 px JPEG in tar");
    bench_stages({.path = cifar, .augment = ddp::Augment::None, .cache = ddp::CachePolicy::Off},
                 "32 px JPEG, no cache, no augmentation");
  }
  bench_stages({.path = cifar, .cutout = 8}, "32 px, in RAM, pad-crop, flip, cutout");
  bench_stages({.path = cifar, .cutout = 8, .channels_last = true}, "the same, channels_last");
  bench_stages({.format = ddp::DataFormat::Synthetic, .image_size = 224, .channels_last = true},
               "synthetic 224 px, channels_last");
  if (argc > 2) {
    bench_decode(*ddp::detail::open_folder_source(argv[2], ddp::Split::Train), "photographs");
    bench_stages({.format = ddp::DataFormat::Folder,
                  .path = argv[2],
                  .image_size = 224,
                  .channels_last = true},
                 "photographs, random-resized-crop 224 px");
  }
  return 0;
}
