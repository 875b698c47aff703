// SPDX-License-Identifier: Apache-2.0
#include "ddp/data/options.hpp"

namespace ddp {

SamplerOptions eval_sampler_options(SamplerOptions options) {
  options.shuffle = false;
  options.drop_last = false;
  options.pad = false;
  return options;
}

static void describe_augmentation(DataOptions& o, FieldVisitor& v) {
  v.field({.name = "augment", .doc = "training augmentation; auto: pad_crop up to 64 px"},
          o.augment,
          {{"auto", Augment::Auto},
           {"none", Augment::None},
           {"pad_crop", Augment::PadCrop},
           {"random_resized_crop", Augment::RandomResizedCrop}});
  v.field({.name = "pad",
           .doc = "pad_crop: zeros around the image",
           .unit = "px",
           .min = 0,
           .max = 1024},
          o.pad);
  v.field({.name = "flip", .doc = "mirror every second training image"}, o.flip);
  v.field({.name = "cutout",
           .doc = "side of a square set to the mean; 0 is off",
           .unit = "px",
           .min = 0,
           .max = 4096},
          o.cutout);
  v.field({.name = "min_scale",
           .doc = "random_resized_crop: smallest share of the area",
           .min = 1e-4,
           .max = 1},
          o.min_scale);
  v.field({.name = "max_scale",
           .doc = "random_resized_crop: largest share of the area",
           .min = 1e-4,
           .max = 1},
          o.max_scale);
  v.field({.name = "min_ratio",
           .doc = "random_resized_crop: smallest width / height",
           .min = 0.1,
           .max = 10},
          o.min_ratio);
  v.field({.name = "max_ratio",
           .doc = "random_resized_crop: largest width / height",
           .min = 0.1,
           .max = 10},
          o.max_ratio);
  v.field({.name = "eval_resize",
           .doc = "shorter side before the centre crop; 0: image_size * 256 / 224 above 64 px",
           .unit = "px",
           .min = 0,
           .max = 16384},
          o.eval_resize);
  v.field({.name = "eval_decode",
           .doc = "evaluation images: full has torchvision's pixels; scaled is faster, and decodes "
                  "large ones at 1/2 to 1/8 of their size as training does"},
          o.eval_decode, {{"full", EvalDecode::Full}, {"scaled", EvalDecode::Scaled}});
  v.field({.name = "mean",
           .doc = "of the channels in 0..1; empty: CIFAR-10's up to 64 px, else ImageNet's"},
          o.mean);
  v.field({.name = "std", .doc = "of the channels in 0..1; empty: as mean"}, o.std);
}

void describe_fields(DataOptions& o, FieldVisitor& v) {
  v.field({.name = "format", .doc = "layout of the data set; auto looks at path"}, o.format,
          {{"auto", DataFormat::Auto},
           {"cifar10", DataFormat::Cifar10},
           {"tar", DataFormat::Tar},
           {"folder", DataFormat::Folder},
           {"synthetic", DataFormat::Synthetic}});
  v.field({.name = "path", .doc = "folder of the data set", .may_differ = true}, o.path);
  v.field({.name = "image_size",
           .doc = "side of the images a model sees; 0: told by the data",
           .unit = "px",
           .min = 0,
           .max = 8192},
          o.image_size);
  v.field({.name = "num_classes", .doc = "0: told by the data", .min = 0, .max = 1e6},
          o.num_classes);
  v.field({.name = "num_samples",
           .doc = "use the first n samples; synthetic: make n; 0: all (synthetic: 2048)",
           .min = 0},
          o.num_samples);
  v.field({.name = "seed", .doc = "of augmentation and synthetic data", .min = 0}, o.seed);
  describe_augmentation(o, v);
  v.field({.name = "channels_last", .doc = "batches in NHWC strides"}, o.channels_last);
  v.field({.name = "corrupt", .doc = "what a corrupt image does; skip takes the next good one"},
          o.corrupt, {{"error", CorruptPolicy::Error}, {"skip", CorruptPolicy::Skip}});
  v.field({.name = "max_corrupt_fraction",
           .doc = "corrupt images allowed with corrupt=skip",
           .min = 0,
           .max = 1},
          o.max_corrupt_fraction);
  v.field(
      {.name = "cache", .doc = "decoded images in RAM; auto: small images within cache_limit_mb"},
      o.cache, {{"auto", CachePolicy::Auto}, {"ram", CachePolicy::Ram}, {"off", CachePolicy::Off}});
  v.field({.name = "cache_limit_mb", .doc = "most that cache=auto keeps", .unit = "MiB", .min = 0},
          o.cache_limit_mb);
  v.field({.name = "max_pixels",
           .doc = "larger images are refused before decoding",
           .unit = "px",
           .min = 1,
           .max = 1e9},
          o.max_pixels);
}

void describe_fields(SamplerOptions& o, FieldVisitor& v) {
  v.field({.name = "shuffle", .doc = "a new permutation every epoch"}, o.shuffle);
  v.field({.name = "seed", .doc = "of the permutations; equal on all ranks", .min = 0}, o.seed);
  v.field({.name = "drop_last", .doc = "cut the tail of an epoch instead of padding it"},
          o.drop_last);
  v.field(
      {.name = "pad", .doc = "repeat samples so that ranks get equally many; off for evaluation"},
      o.pad);
}

static void describe_device_fields(LoaderOptions& o, FieldVisitor& v) {
  v.field({.name = "device_resident",
           .doc = "keep a set of decoded images in GPU memory; auto: where it fits"},
          o.device_resident,
          {{"auto", DevicePolicy::Auto}, {"on", DevicePolicy::On}, {"off", DevicePolicy::Off}});
  v.field({.name = "device_resident_limit_mb",
           .doc = "largest set that device_resident=auto keeps there",
           .unit = "MiB",
           .min = 0},
          o.device_resident_limit_mb);
  v.field({.name = "device_transform",
           .doc = "crop, resize, flip and normalise JPEG images on the GPU"},
          o.device_transform,
          {{"auto", DevicePolicy::Auto}, {"on", DevicePolicy::On}, {"off", DevicePolicy::Off}});
  v.field(
      {.name = "jpeg_decoder",
       .doc = "cpu: the loader's threads; nvjpeg: the GPU's JPEG engines, where it has some and "
              "finishes the images"},
      o.jpeg_decoder, {{"cpu", JpegDecoder::Cpu}, {"nvjpeg", JpegDecoder::NvJpeg}});
  v.field({.name = "image_dtype", .doc = "of image batches; auto: what amp computes in, or fp32"},
          o.image_dtype,
          {{"auto", ImageDtype::Auto},
           {"fp32", ImageDtype::Fp32},
           {"bf16", ImageDtype::Bf16},
           {"fp16", ImageDtype::Fp16}});
}

void describe_fields(LoaderOptions& o, FieldVisitor& v) {
  v.field({.name = "batch_size", .doc = "samples a rank and step", .min = 1, .max = 1e7},
          o.batch_size);
  v.field({.name = "global_batch_size",
           .doc = "samples of all ranks a step; 0: batch_size * world_size",
           .min = 0,
           .max = 1e9},
          o.global_batch_size);
  v.field({.name = "num_workers",
           .doc = "loader threads; 0 loads on the calling thread",
           .min = 0,
           .max = 1024},
          o.num_workers);
  v.field(
      {.name = "prefetch_batches", .doc = "batches made ahead of the step", .min = 1, .max = 1024},
      o.prefetch_batches);
  v.field({.name = "drop_last", .doc = "drop the last batch of an epoch where it is not full"},
          o.drop_last);
  v.field({.name = "pin_memory", .doc = "page-locked buffers and a copy stream on CUDA"},
          o.pin_memory);
  describe_device_fields(o, v);
}

}  // namespace ddp
