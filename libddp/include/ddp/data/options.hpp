// SPDX-License-Identifier: Apache-2.0
// Settings of datasets, sampler and loader (docs/configuration.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ddp/core/fields.hpp"
#include "ddp/detail/usage_mark.hpp"

namespace ddp {

enum class DataFormat {
  Auto,       ///< detected from the files at `path`
  Cifar10,    ///< official binary files data_batch_1..5.bin, test_batch.bin
  Cifar100,   ///< official binary files train.bin, test.bin, fine_label_names.txt
  Mnist,      ///< IDX files as of MNIST and Fashion-MNIST, also with .gz
  Tar,        ///< image tar shards in WebDataset layout: train-*.tar and test-*.tar
  Folder,     ///< train/<class>/* and test/<class>/* (or val/): .jpg, .jpeg, .png, .webp
  Synthetic,  ///< generated from `seed` and the index
};
enum class Augment {
  Auto,              ///< PadCrop up to 64 px (mnist: None), RandomResizedCrop above
  None,              ///< as in evaluation: resize the shorter side, centre crop
  PadCrop,           ///< zero-padding, random crop, flip (CIFAR)
  RandomResizedCrop  ///< random area and aspect ratio, flip (ImageNet)
};
/// How images for a centre crop are decoded (evaluation and Augment::None).
enum class EvalDecode {
  Full,   ///< in full size: the bytes of torchvision's Resize and CenterCrop on Pillow images
  Scaled  ///< as in training: JPEG at 1/2, 1/4 or 1/8 where large enough; not rounded
};
enum class CorruptPolicy { Error, Skip };
enum class CachePolicy { Auto, Ram, Off };

struct RandomResizedCropOptions {
  double min_scale = 0.08;  ///< smallest share of the area
  double max_scale = 1.0;
  double min_ratio = 0.75;  ///< width / height
  double max_ratio = 4.0 / 3.0;
};

struct RandAugmentOptions {
  int64_t ops = 0;        ///< operations per training image, 0 to 14; 0 is off
  int64_t magnitude = 9;  ///< strength, 0 to 30
};

struct DataOptions {
  DataFormat format = DataFormat::Auto;
  std::string path = "data/cifar10-sample";
  /// Pixels. 0: 32 for cifar10 and cifar100, 28 for mnist, 224 for synthetic, else the first
  /// image's shorter side if no side exceeds 64, or 224.
  int64_t image_size = 0;
  int64_t channels = 0;     ///< 3 (RGB) or 1 (grey) of an example; 0: 1 for mnist, else 3
  int64_t num_classes = 0;  ///< 0: from the data (synthetic: 10); larger labels are errors
  int64_t num_samples = 0;  ///< the first n, 0: all; synthetic: n samples, 0: 2048 train, 512 test
  int64_t seed = 0;         ///< for augmentation and synthetic data
  Augment augment = Augment::Auto;  ///< of the training split
  int64_t pad = 4;                  ///< PadCrop: zeros around the image
  bool flip = true;                 ///< mirror with probability 1/2
  int64_t cutout = 0;               ///< side of the square set to the mean; 0 is off
  RandAugmentOptions rand_augment{};
  RandomResizedCropOptions random_resized_crop{};
  int64_t eval_resize = 0;  ///< shorter side before the crop; 0: image_size (* 256 / 224 above 64)
  EvalDecode eval_decode = EvalDecode::Full;
  /// Per channel; empty: of cifar100 and mnist, else CIFAR-10's up to 64 px, else ImageNet's.
  std::vector<double> mean = {};
  std::vector<double> std = {};
  bool channels_last = false;  ///< batches in NHWC strides
  CorruptPolicy corrupt = CorruptPolicy::Error;
  double max_corrupt_fraction = 0.001;  ///< of the data set, with `corrupt` = skip
  CachePolicy cache = CachePolicy::Auto;
  int64_t cache_limit_mb = 2048;  ///< decoded images kept by `cache` = auto
  int64_t max_pixels = 64'000'000;
  detail::UsageMark usage{};  ///< not a setting: set when a library object receives these options
};

struct SamplerOptions {
  bool shuffle = true;
  int64_t seed = 0;        ///< equal on all ranks
  bool drop_last = false;  ///< drop the tail instead of padding, so all ranks get equally many
  bool pad = true;         ///< repeat samples for equal ranks; false (evaluation): each sample once
  detail::UsageMark usage{};  ///< not a setting: set when a library object receives these options
};

/// Use of the GPU: Auto: where possible; On: always, else an error; Off: never.
enum class DevicePolicy { Auto, On, Off };
/// Auto: float32; trainers may choose the model's compute dtype.
enum class ImageDtype { Auto, Fp32, Bf16, Fp16 };
/// Decoder of JPEG images that the GPU transforms.
enum class JpegDecoder {
  Cpu,    ///< libjpeg-turbo, on the loader's threads
  NvJpeg  ///< the GPU's engines, for baseline images (docs/semantics_training.md, "Images")
};

struct LoaderOptions {
  int64_t batch_size = 32;        ///< samples per rank and step
  int64_t global_batch_size = 0;  ///< of all ranks, split evenly; 0: batch_size * world_size
  int64_t num_workers = 2;        ///< threads; 0 loads on the calling thread
  int64_t prefetch_batches = 4;   ///< batches prepared or in preparation ahead of the step
  bool drop_last = false;         ///< drop an epoch's last batch if not full
  bool pin_memory = true;         ///< page-locked buffers and a copy stream (CUDA)
  /// Keeps decoded images of one size in GPU memory as bytes; one kernel makes a batch.
  DevicePolicy device_resident = DevicePolicy::Auto;
  int64_t device_resident_limit_mb = 2048;  ///< largest data set that `auto` puts on the GPU
  /// Copies decoded crops to the GPU as bytes, which resizes, flips and normalises them.
  DevicePolicy device_transform = DevicePolicy::Auto;
  JpegDecoder jpeg_decoder = JpegDecoder::Cpu;
  ImageDtype image_dtype = ImageDtype::Auto;  ///< of the batches of a ddp::Dataset
  detail::UsageMark usage{};  ///< not a setting: set when a library object receives these options
};

/// The settings of a sampler for evaluation: no shuffle, each sample once.
SamplerOptions eval_sampler_options(SamplerOptions options);
/// The settings of a loader for evaluation: every sample, `batch_size` of them per rank.
LoaderOptions eval_loader_options(LoaderOptions options);

void describe_fields(DataOptions& options, FieldVisitor& visitor);
void describe_fields(SamplerOptions& options, FieldVisitor& visitor);
void describe_fields(LoaderOptions& options, FieldVisitor& visitor);

}  // namespace ddp
