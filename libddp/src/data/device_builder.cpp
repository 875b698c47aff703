// SPDX-License-Identifier: Apache-2.0
// Batches of JPEG images that the GPU transforms. Loader threads decode each sample's region into
// one page-locked block per batch, which is copied and then resized on the GPU.
#include "data/device_builder.hpp"

#include "data/image_dataset.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

#ifdef DDP_HAS_CUDA
#include "data/region_builder.hpp"
#endif

namespace ddp::detail {

namespace {

std::string why_not(const Dataset& dataset, at::Device device) {
  if (!device.is_cuda()) {
    return concat("the device is ", device.str(), ": context.device=cuda");
  }
#ifdef DDP_HAS_CUDA
  const ImageDataset* images = as_images(dataset);
  if (images == nullptr) {
    return "the data set is not one of JPEG images: loader.device_transform=auto";
  }
  if (images->decoded() != nullptr) {
    return "its images are kept decoded: data.cache=off, or loader.device_resident=auto";
  }
  return {};
#else
  (void)dataset;
  return "this build has no CUDA parts";
#endif
}

}  // namespace

std::unique_ptr<BatchBuilder<Batch>> make_device_builder(
    const std::shared_ptr<const Dataset>& dataset, at::Device device, const LoaderOptions& options,
    int num_slots, int64_t max_batch) {
  const std::string reason = why_not(*dataset, device);
  if (options.device_transform == DevicePolicy::On && !reason.empty()) {
    throw SettingsError(concat("loader.device_transform=on cannot be: ", reason));
  }
  if (options.device_transform == DevicePolicy::Off || !reason.empty()) {
    if (options.jpeg_decoder == JpegDecoder::NvJpeg) {
      say_cpu_decodes(!reason.empty() ? reason : "loader.device_transform=off");
    }
    return nullptr;
  }
#ifdef DDP_HAS_CUDA
  return make_region_builder(dataset, device, options, num_slots, max_batch);
#else
  (void)num_slots;
  (void)max_batch;
  return nullptr;
#endif
}

}  // namespace ddp::detail
