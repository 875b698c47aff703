// SPDX-License-Identifier: Apache-2.0
// Settings of datasets, sampler and loader. All have working defaults; `ddp::Config` reads them
// from the sections `data`, `sampler` and `loader`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ddp/core/fields.hpp"
#include "ddp/core/taken_mark.hpp"

namespace ddp {

enum class DataFormat {
  Auto,       ///< told from what lies at `path`
  Cifar10,    ///< official binary files data_batch_1..5.bin, test_batch.bin
  Tar,        ///< image tar shards in WebDataset layout: train-*.tar and test-*.tar
  Folder,     ///< train/<class>/*.jpg and test/<class>/*.jpg (or val/)
  Synthetic,  ///< made from `seed` and the index, no files
};
enum class Augment {
  Auto,              ///< PadCrop up to 64 px, RandomResizedCrop above
  None,              ///< what evaluation does: resize the shorter side, centre crop
  PadCrop,           ///< zero-padding, random crop, flip (CIFAR)
  RandomResizedCrop  ///< random area and aspect ratio, flip (ImageNet)
};
/// How images are decoded that are resized and cut at the centre (evaluation, and Augment::None).
enum class EvalDecode {
  Full,   ///< at their own size: the bytes of torchvision's Resize and CenterCrop on Pillow images
  Scaled  ///< as in training: JPEG at 1/2, 1/4 or 1/8 where that is still enough; not rounded
};
enum class CorruptPolicy { Error, Skip };
enum class CachePolicy { Auto, Ram, Off };

struct DataOptions {
  DataFormat format = DataFormat::Auto;
  std::string path = "data/cifar10-sample";
  int64_t image_size = 0;  ///< pixels; 0: 32 for cifar10 and small images in RAM, else 224
  int64_t num_classes =
      0;  ///< 0: told by the data (synthetic: 10); otherwise larger labels are errors
  int64_t num_samples =
      0;             ///< of synthetic data (0: 2048 train, 512 test); else the first n, 0 for all
  int64_t seed = 0;  ///< of augmentation and synthetic data
  Augment augment = Augment::Auto;  ///< of the training split
  int64_t pad = 4;                  ///< PadCrop: zeros around the image
  bool flip = true;                 ///< mirror every second image
  int64_t cutout = 0;               ///< side of the square set to the mean; 0 is off
  double min_scale = 0.08;          ///< RandomResizedCrop: smallest area cut out
  double max_scale = 1.0;
  double min_ratio = 0.75;  ///< RandomResizedCrop: width / height
  double max_ratio = 4.0 / 3.0;
  int64_t eval_resize = 0;  ///< shorter side before the centre crop; 0: image_size * 256 / 224, or
                            ///< image_size where that is at most 64
  EvalDecode eval_decode = EvalDecode::Full;
  std::vector<double> mean =
      {};  ///< a channel, in 0..1; empty: CIFAR-10's up to 64 px, else ImageNet's
  std::vector<double> std = {};
  bool channels_last = false;  ///< batches in NHWC strides
  CorruptPolicy corrupt = CorruptPolicy::Error;
  double max_corrupt_fraction = 0.001;  ///< of the data set, with `corrupt` = skip
  CachePolicy cache = CachePolicy::Auto;
  int64_t cache_limit_mb = 2048;  ///< decoded images kept by `cache` = auto
  int64_t max_pixels = 64'000'000;
  detail::TakenMark taken{};  ///< not a setting: tells ddp::Config that these options are used
};

struct SamplerOptions {
  bool shuffle = true;
  int64_t seed = 0;        ///< equal on all ranks
  bool drop_last = false;  ///< cut the tail so that ranks get equally many, instead of padding
  bool pad = true;  ///< repeat samples so that ranks get equally many; false (evaluation): each
                    ///< sample once, ranks differ by at most one
  detail::TakenMark taken{};  ///< not a setting: tells ddp::Config that these options are used
};

/// Whether something is done on the GPU: where it can be, always (else an error), or never.
enum class DevicePolicy { Auto, On, Off };
enum class ImageDtype {
  Auto,  ///< float32; trainers may take what their model computes in
  Fp32,
  Bf16,
  Fp16
};

/// What decodes JPEG images for a GPU that finishes them.
enum class JpegDecoder {
  Cpu,    ///< libjpeg-turbo, on the loader's threads
  NvJpeg  ///< the GPU's JPEG engines where it has some (A100, H100 and later of their kind)
};

struct LoaderOptions {
  int64_t batch_size = 32;        ///< samples a rank and step
  int64_t global_batch_size = 0;  ///< samples of all ranks a step, shared as evenly as possible; 0:
                                  ///< batch_size * world_size
  int64_t num_workers = 2;        ///< threads; 0 loads on the calling thread
  int64_t prefetch_batches = 4;   ///< batches made or being made ahead of the step
  bool drop_last = false;         ///< drop an epoch's last batch where it is not full
  bool pin_memory = true;  ///< page-locked buffers and a copy stream where the device is CUDA
  /// A data set of decoded images of one size lies in GPU memory as bytes, and one kernel makes a
  /// batch of them.
  DevicePolicy device_resident = DevicePolicy::Auto;
  int64_t device_resident_limit_mb = 2048;  ///< largest data set that `auto` puts there
  /// Decoded parts of images go to the GPU as bytes and are resized, flipped and normalised there.
  /// With EvalDecode::Full the loader's threads have resized evaluation images by then.
  DevicePolicy device_transform = DevicePolicy::Auto;
  /// With NvJpeg the GPU's engines decode baseline images that need not be decoded at 1/2 or less
  /// (in evaluation with EvalDecode::Scaled alone), libjpeg-turbo all others and those that nvJPEG
  /// refuses. Pixels are the CPU's at 4:4:4 and in grey images, colours near them at other
  /// samplings. Damage inside of a file is noticed only where it makes what no JPEG holds. Where
  /// there are no engines, no library or no memory for the images, that is said once and the CPU
  /// decodes.
  JpegDecoder jpeg_decoder = JpegDecoder::Cpu;
  ImageDtype image_dtype = ImageDtype::Auto;  ///< of the batches of a ddp::Dataset
  detail::TakenMark taken{};  ///< not a setting: tells ddp::Config that these options are used
};

/// The settings of an evaluation loader: no shuffle, each sample once.
SamplerOptions eval_sampler_options(SamplerOptions options);

void describe_fields(DataOptions& options, FieldVisitor& visitor);
void describe_fields(SamplerOptions& options, FieldVisitor& visitor);
void describe_fields(LoaderOptions& options, FieldVisitor& visitor);

}  // namespace ddp
