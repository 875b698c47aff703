// SPDX-License-Identifier: Apache-2.0
// Rates of each stage of data loading, one per line: one core's work, and the loader's output.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "data/images/batch_builders.hpp"
#include "data/images/image_transform.hpp"
#include "data/images/jpeg.hpp"
#include "data/sources/image_dataset.hpp"
#include "data/sources/image_source.hpp"
#include "data/sources/tar_index.hpp"
#include "ddp/core/error.hpp"
#include "ddp/data/data_loader.hpp"
#include "ddp/data/dataset.hpp"
#include "ddp/train/command_line.hpp"

#ifdef DDP_HAS_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

#include "data/images/nvjpeg/jpeg_scan.hpp"
#include "data/images/nvjpeg/nvjpeg.hpp"
#endif

namespace {

constexpr const char* kUsage = R"(usage:
  bench_loader [CIFAR_PATH [JPEG_PATH]]
  bench_loader jpeg JPEG_PATH [BATCH [WORKERS…]]

CIFAR_PATH: any layout of 32 px images (default: the embedded sample). JPEG_PATH: photographs for
random-resized-crop at 224 px, as class folders, tar shards, or one tar file of unlabelled images
(JPEG, PNG or WebP; repeated if there are few). `jpeg` runs that part alone. With a GPU it also reports the
copy, the kernels, nvJPEG and the whole loader.
)";

using Clock = std::chrono::steady_clock;

// Returns the median rate of five rounds of at least 0.3 s each.
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
    print(ddp::concat(name, ", loader, ", num_workers, " workers"),
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

// Links to the files of a folder until there are `count`, enough for several batches.
void repeat_files(const std::filesystem::path& folder, size_t count) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    files.push_back(entry.path());
  }
  for (size_t i = files.size(); i < count && !files.empty(); ++i) {
    std::filesystem::create_hard_link(files[i % files.size()],
                                      folder / ("again" + std::to_string(i) + ".jpg"));
  }
}

// Presents `path` as a data set: a folder itself, or a temporary folder for a file.
class DataPath {
 public:
  explicit DataPath(const std::string& given) : path_(given) {
    namespace fs = std::filesystem;
    if (!fs::is_regular_file(given)) {
      return;
    }
    const ddp::detail::DataFile file(given);
    path_ = (fs::temp_directory_path() / "bench_loader_XXXXXX").string();
    if (mkdtemp(path_.data()) == nullptr) {
      throw ddp::DataError("cannot make a folder " + path_ + ": set TMPDIR to one with room");
    }
    made_ = path_;
    const fs::path photographs = fs::path(path_) / "train" / "photographs";
    try {
      fs::create_directories(photographs);
      for (const auto& entry : ddp::detail::read_tar_index(file)) {
        std::string bytes(static_cast<size_t>(entry.size), '\0');
        file.read_at(entry.offset, bytes.data(), entry.size);
        const fs::path name = fs::path(entry.name).filename().replace_extension(".jpg");
        std::ofstream(photographs / name, std::ios::binary) << bytes;
      }
      repeat_files(photographs, 4096);
    } catch (...) {
      remove();
      throw;
    }
  }
  ~DataPath() { remove(); }
  DataPath(const DataPath&) = delete;
  DataPath& operator=(const DataPath&) = delete;
  const std::string& path() const { return path_; }

 private:
  void remove() {
    std::error_code ignored;
    if (!made_.empty()) {
      std::filesystem::remove_all(made_, ignored);
    }
  }
  std::string path_;
  std::string made_;
};

void bench_part(const ddp::Dataset& dataset) {
  const auto* images = ddp::detail::as_images(dataset);
  std::vector<uint8_t> memory;
  int64_t whole = 0;
  print("photographs, read and decode the whole image, one core", images_per_second([&] {
          (void)images->read_file(
              whole++ % dataset.size(),
              [&](const std::vector<uint8_t>& bytes, const ddp::detail::DataSource& where,
                  const ddp::detail::ImageHeader& header) {
                memory.resize(static_cast<size_t>(header.width) *
                              static_cast<size_t>(header.height) * 3);
                ddp::detail::decode_image_region(
                    bytes, where, 1, {0, 0, header.width, header.height}, memory.data());
              });
          return 1;
        }));
  ddp::detail::RegionPlan plan;
  int64_t next = 0, num_bytes = 0, count = 0;
  print("photographs, read and decode the crop's part, one core", images_per_second([&] {
          (void)images->read_region(next % dataset.size(), next / dataset.size(), plan,
                                    [&](const ddp::detail::RegionPlan& p) {
                                      const auto size = static_cast<size_t>(p.region.width) *
                                                        static_cast<size_t>(p.region.height) * 3;
                                      memory.resize(std::max(memory.size(), size));
                                      num_bytes += static_cast<int64_t>(size);
                                      return memory.data();
                                    });
          ++next;
          ++count;
          return 1;
        }));
  std::printf("photographs: %.0f KB a part, decoded %s\n", double(num_bytes) / 1e3 / double(count),
              ddp::detail::decodes_regions() ? "alone" : "with the whole image");
}

#ifdef DDP_HAS_CUDA
// Measures copy and kernels of a batch, without loader threads.
void bench_device_stages(const std::shared_ptr<const ddp::Dataset>& dataset, int64_t batch_size,
                         const ddp::LoaderOptions& options) {
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  const auto builder = ddp::detail::make_device_builder(dataset, at::kCUDA, options, 1, batch_size);
  builder->resize(0, batch_size);
  for (int64_t i = 0; i < batch_size; ++i) {
    builder->fill(0, i, i % dataset->size(), i / dataset->size());
  }
  builder->finish(0);
  print("photographs, copy and kernels of a batch", images_per_second([&] {
          (void)builder->take(0);
          stream.synchronize();
          return batch_size;
        }));
}

// Measures the GPU's JPEG engines alone, on the images that the loader gives to them.
void bench_nvjpeg(const ddp::Dataset& dataset, int64_t batch_size) {
  std::string reason;
  const auto nvjpeg = ddp::detail::NvJpeg::open(reason);
  if (!nvjpeg) {
    std::printf("photographs, nvJPEG: %s\n", reason.c_str());
    return;
  }
  const auto& images = *ddp::detail::as_images(dataset);
  std::vector<std::vector<uint8_t>> files;
  std::vector<ddp::CropBox> regions;
  for (int64_t i = 0; i < 4 * batch_size && std::ssize(files) < batch_size; ++i) {
    (void)images.read_file(
        i % dataset.size(), [&](const std::vector<uint8_t>& bytes, const ddp::detail::DataSource&,
                                const ddp::detail::ImageHeader& header) {
          const auto plan =
              images.transform().plan(header.width, header.height, 0, static_cast<uint64_t>(i));
          if (plan.denominator == 1 && ddp::detail::is_plain_baseline(bytes)) {
            files.push_back(bytes);
            regions.push_back(plan.region);
          }
        });
  }
  std::vector<ddp::detail::NvJpegImage> batch;
  std::vector<at::Tensor> memory;
  for (size_t i = 0; i < files.size(); ++i) {
    const auto& region = regions[i];
    memory.push_back(at::empty({int64_t{region.width} * region.height * 3},
                               at::TensorOptions().dtype(at::kByte).device(at::kCUDA)));
    batch.push_back({&files[i], region, memory.back().mutable_data_ptr<uint8_t>()});
  }
  const auto stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/true);
  if (batch.empty() || nvjpeg->decode(batch, stream) != ddp::detail::NvJpegAnswer::Decoded) {
    std::printf("photographs, nvJPEG: decodes no such images\n");
    return;
  }
  print("photographs, nvJPEG alone, one batch at a time", images_per_second([&] {
          (void)nvjpeg->decode(batch, stream);
          return std::ssize(batch);
        }));
}
#endif

void bench_photographs(const std::string& path, int64_t wanted_batch,
                       const std::vector<int64_t>& num_workers) {
  ddp::DataOptions options{.path = path, .image_size = 224, .channels_last = true};
  options.cache = ddp::CachePolicy::Off;
  const auto dataset = ddp::make_dataset(options);
  const int64_t batch_size = std::min<int64_t>(wanted_batch, dataset->size());
  bench_part(*dataset);
#ifdef DDP_HAS_CUDA
  if (at::cuda::is_available()) {
    const auto stream = c10::cuda::getStreamFromPool();
    const c10::cuda::CUDAStreamGuard guard(stream);
    ddp::LoaderOptions loading{
        .batch_size = batch_size, .drop_last = true, .image_dtype = ddp::ImageDtype::Bf16};
    bench_device_stages(dataset, batch_size, loading);
    bench_nvjpeg(*dataset, batch_size);
    for (const auto& [decoder, name] :
         {std::pair{ddp::JpegDecoder::Cpu, ""}, std::pair{ddp::JpegDecoder::NvJpeg, ", nvJPEG"}}) {
      for (int64_t workers : num_workers) {
        loading.jpeg_decoder = decoder;
        loading.num_workers = workers;
        ddp::DataLoader loader(dataset, ddp::DistributedSampler(dataset->size(), 0, 1), at::kCUDA,
                               loading);
        print(ddp::concat("photographs to the GPU, 224 px bf16, ", workers, " workers", name),
              images_per_second([&] {
                const auto batch = loader.next();
                stream.synchronize();
                return batch.size();
              }));
      }
    }
  }
#endif
  for (int64_t workers : num_workers) {
    ddp::DataLoader loader(dataset, ddp::DistributedSampler(dataset->size(), 0, 1), at::kCPU,
                           {.batch_size = batch_size, .num_workers = workers});
    print(ddp::concat("photographs on the CPU, 224 px fp32, ", workers, " workers"),
          images_per_second([&] { return loader.next().size(); }));
  }
}

int measure(int argc, char** argv) {
  if (argc > 2 && std::string(argv[1]) == "jpeg") {
    std::vector<int64_t> num_workers;
    for (int i = 4; i < argc; ++i) {
      num_workers.push_back(std::atoll(argv[i]));
    }
    if (num_workers.empty()) {
      num_workers.push_back(std::thread::hardware_concurrency());
    }
    const DataPath photographs(argv[2]);
    bench_photographs(photographs.path(), argc > 3 ? std::atoll(argv[3]) : 256, num_workers);
    return 0;
  }
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
    const DataPath given(argv[2]);
    const std::string& photographs = given.path();
    const bool shards = !ddp::detail::find_tar_shards(photographs, ddp::Split::Train).empty();
    bench_decode(shards ? *ddp::detail::open_tar_source(photographs, ddp::Split::Train)
                        : *ddp::detail::open_folder_source(photographs, ddp::Split::Train),
                 "photographs");
    bench_photographs(photographs, 256, {1, std::thread::hardware_concurrency()});
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (ddp::answer_command_line(argc, argv, kUsage)) {
    return 0;
  }
  try {
    return measure(argc, argv);
  } catch (const ddp::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.exit_code());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
