// SPDX-License-Identifier: Apache-2.0
#include "ddp/data/options.hpp"

#include "data/images/rand_augment.hpp"
#include "data/images/region_decoder.hpp"

namespace ddp {

SamplerOptions eval_sampler_options(SamplerOptions options) {
  options.shuffle = false;
  options.drop_last = false;
  options.pad = false;
  return options;
}

LoaderOptions eval_loader_options(LoaderOptions options) {
  options.drop_last = false;
  options.global_batch_size = 0;
  return options;
}

static void describe_rand_augment(RandAugmentOptions& o, FieldVisitor& v) {
  v.field({.name = "rand_augment_ops",
           .doc = "Random operations per training image, as torchvision's v2.RandAugment; usually "
                  "2. They run on the CPU. 0: off.",
           .min = 0,
           .max = detail::kNumAugmentOps},
          o.ops);
  v.field({.name = "rand_augment_magnitude",
           .doc = "RandAugment: strength of the operations, of torchvision's 31 bins.",
           .min = 0,
           .max = detail::kNumMagnitudes - 1},
          o.magnitude);
}

static void describe_random_resized_crop(RandomResizedCropOptions& o, FieldVisitor& v) {
  v.field({.name = "min_scale",
           .doc = "random_resized_crop: smallest share of the image's area.",
           .min = 1e-4,
           .max = 1},
          o.min_scale);
  v.field({.name = "max_scale",
           .doc = "random_resized_crop: largest share of the image's area.",
           .min = 1e-4,
           .max = 1},
          o.max_scale);
  v.field({.name = "min_ratio",
           .doc = "random_resized_crop: smallest aspect ratio, width / height.",
           .min = 0.1,
           .max = 10},
          o.min_ratio);
  v.field({.name = "max_ratio",
           .doc = "random_resized_crop: largest aspect ratio, width / height.",
           .min = 0.1,
           .max = 10},
          o.max_ratio);
}

static void describe_augmentation(DataOptions& o, FieldVisitor& v) {
  v.field({.name = "augment",
           .doc = "Training augmentation. auto: none for mnist, else pad_crop up to 64 px, "
                  "random_resized_crop above."},
          o.augment,
          {{"auto", Augment::Auto},
           {"none", Augment::None},
           {"pad_crop", Augment::PadCrop},
           {"random_resized_crop", Augment::RandomResizedCrop}});
  v.field({.name = "pad",
           .doc = "pad_crop: width of the zero padding around the image.",
           .unit = "px",
           .min = 0,
           .max = 1024},
          o.pad);
  v.field({.name = "flip", .doc = "Flip each training image horizontally with probability 0.5."},
          o.flip);
  v.field({.name = "cutout",
           .doc = "Side of a random square that is set to data.mean. 0: off.",
           .unit = "px",
           .min = 0,
           .max = 4096},
          o.cutout);
  describe_rand_augment(o.rand_augment, v);
  describe_random_resized_crop(o.random_resized_crop, v);
  v.field({.name = "eval_resize",
           .doc = "Shorter side of evaluation images before the centre crop. 0: image_size up to "
                  "64 px, image_size * 256 / 224 above.",
           .unit = "px",
           .min = 0,
           .max = 16384},
          o.eval_resize);
  v.field({.name = "eval_decode",
           .doc = "Decoding of evaluation images. full: torchvision's pixels. scaled: faster, "
                  "decodes large JPEG images at 1/2 to 1/8 of their size, as training does."},
          o.eval_decode, {{"full", EvalDecode::Full}, {"scaled", EvalDecode::Scaled}});
  v.field({.name = "mean",
           .doc = "Mean of each channel, in 0..1. Empty: of the data set for cifar100 and mnist, "
                  "else CIFAR-10's up to 64 px, else ImageNet's."},
          o.mean);
  v.field(
      {.name = "std", .doc = "Standard deviation of each channel, in 0..1. Empty: as for mean."},
      o.std);
}

static void describe_decoding(DataOptions& o, FieldVisitor& v) {
  v.field({.name = "corrupt",
           .doc = "Action on a corrupt image. error: end the run. skip: use the next good image."},
          o.corrupt, {{"error", CorruptPolicy::Error}, {"skip", CorruptPolicy::Skip}});
  v.field({.name = "max_corrupt_fraction",
           .doc = "Share of corrupt images allowed with corrupt=skip.",
           .min = 0,
           .max = 1},
          o.max_corrupt_fraction);
  v.field({.name = "cache",
           .doc = "Keep decoded images in RAM. auto: small images within cache_limit_mb."},
          o.cache,
          {{"auto", CachePolicy::Auto}, {"ram", CachePolicy::Ram}, {"off", CachePolicy::Off}});
  v.field({.name = "cache_limit_mb",
           .doc = "Most memory that cache=auto uses.",
           .unit = "MiB",
           .min = 0},
          o.cache_limit_mb);
  v.field({.name = "max_pixels",
           .doc = "Images with more pixels are refused before decoding.",
           .unit = "px",
           .min = 1,
           .max = 1e9},
          o.max_pixels);
}

void describe_fields(DataOptions& o, FieldVisitor& v) {
  v.field({.name = "format", .doc = "Layout of the data set. auto: detected from path."}, o.format,
          {{"auto", DataFormat::Auto},
           {"cifar10", DataFormat::Cifar10},
           {"cifar100", DataFormat::Cifar100},
           {"mnist", DataFormat::Mnist},
           {"tar", DataFormat::Tar},
           {"folder", DataFormat::Folder},
           {"synthetic", DataFormat::Synthetic}});
  v.field({.name = "path", .doc = "Folder of the data set.", .may_differ = true, .common = true},
          o.path);
  v.field({.name = "image_size",
           .doc = "Side of the model's input images. 0: the shorter side of the first "
                  "image if no side exceeds 64 px, else 224 (also for synthetic).",
           .unit = "px",
           .min = 0,
           .max = 8192},
          o.image_size);
  v.field({.name = "channels",
           .doc = "Channels of the model's input images: 3 is RGB, 1 is grey. 0: 1 for mnist, else "
                  "3.",
           .min = 0,
           .max = 3},
          o.channels);
  v.field({.name = "num_classes",
           .doc = "Number of classes. 0: taken from the data.",
           .min = 0,
           .max = 1e6},
          o.num_classes);
  v.field({.name = "num_samples",
           .doc = "Use only the first n samples; synthetic: generate n. 0: all "
                  "(synthetic: 2048 training, 512 test).",
           .min = 0},
          o.num_samples);
  v.field({.name = "seed", .doc = "Seed for augmentation and synthetic data.", .min = 0}, o.seed);
  describe_augmentation(o, v);
  v.field({.name = "channels_last", .doc = "Make batches with NHWC strides."}, o.channels_last);
  describe_decoding(o, v);
}

void describe_fields(SamplerOptions& o, FieldVisitor& v) {
  v.field({.name = "shuffle", .doc = "Shuffle the samples in every epoch."}, o.shuffle);
  v.field({.name = "seed", .doc = "Seed for shuffling; equal on all ranks.", .min = 0}, o.seed);
  v.field({.name = "drop_last",
           .doc = "Drop the last samples of an epoch, instead of repeating some, so that all ranks "
                  "get equally many."},
          o.drop_last);
  v.field({.name = "pad",
           .doc = "Repeat samples so that all ranks get equally many. Use false for evaluation."},
          o.pad);
}

static void describe_device_fields(LoaderOptions& o, FieldVisitor& v) {
  v.field({.name = "device_resident",
           .doc = "Keep the decoded images of the data set in GPU memory. auto: if they "
                  "need at most device_resident_limit_mb."},
          o.device_resident,
          {{"auto", DevicePolicy::Auto}, {"on", DevicePolicy::On}, {"off", DevicePolicy::Off}});
  v.field({.name = "device_resident_limit_mb",
           .doc = "Largest data set that device_resident=auto keeps in GPU memory.",
           .unit = "MiB",
           .min = 0},
          o.device_resident_limit_mb);
  v.field({.name = "device_transform",
           .doc = "Crop, resize, flip and normalise the images of files on the GPU."},
          o.device_transform,
          {{"auto", DevicePolicy::Auto}, {"on", DevicePolicy::On}, {"off", DevicePolicy::Off}});
  v.field(
      {.name = "jpeg_decoder",
       .doc = "Decoder of JPEG images. cpu: the loader's threads. nvjpeg: the GPU's JPEG engines. "
              "Without such engines or device_transform the loader warns and uses its threads."},
      o.jpeg_decoder, detail::jpeg_decoder_names());
  v.field({.name = "image_dtype",
           .doc = "Dtype of image batches. auto: amp.dtype, or fp32 without amp."},
          o.image_dtype,
          {{"auto", ImageDtype::Auto},
           {"fp32", ImageDtype::Fp32},
           {"bf16", ImageDtype::Bf16},
           {"fp16", ImageDtype::Fp16}});
}

void describe_fields(LoaderOptions& o, FieldVisitor& v) {
  v.field({.name = "batch_size", .doc = "Samples per rank and micro-batch.", .min = 1, .max = 1e7},
          o.batch_size);
  v.field({.name = "global_batch_size",
           .doc = "Samples of all ranks per micro-batch. 0: batch_size * world_size.",
           .min = 0,
           .max = 1e9},
          o.global_batch_size);
  v.field({.name = "num_workers",
           .doc = "Loader threads. 0: load on the calling thread.",
           .min = 0,
           .max = 1024},
          o.num_workers);
  v.field({.name = "prefetch_batches",
           .doc = "Batches prepared ahead of the step.",
           .min = 1,
           .max = 1024},
          o.prefetch_batches);
  v.field({.name = "drop_last", .doc = "Drop the last batch of an epoch if it is not full."},
          o.drop_last);
  v.field({.name = "pin_memory", .doc = "Use page-locked buffers and a copy stream on CUDA."},
          o.pin_memory);
  describe_device_fields(o, v);
}

}  // namespace ddp
