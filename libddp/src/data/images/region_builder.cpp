// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "comm/cuda_check.hpp"
#include "data/images/batch_builders.hpp"
#include "data/images/region_decoder.hpp"
#include "data/images/resample_kernels.hpp"
#include "data/sources/image_dataset.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

namespace {

// Size of a slot's block in multiples of the output's pixels. The shorter side of a region decoded
// at 1/2, 1/4 or 1/8 is one to two times the output's side. Pixels that do not fit cost an
// additional copy through the driver's buffer.
constexpr double kRoom = 2.5;

/// A RegionDecoder fills the slots. take() copies a slot to the GPU and starts the kernels that
/// resize its regions. The copied block begins with a DeviceRegion per sample.
class RegionBuilder final : public BatchBuilder<Batch> {
 public:
  RegionBuilder(std::shared_ptr<const Dataset> dataset, at::Device device,
                const LoaderOptions& options, int num_slots, int64_t max_batch)
      : dataset_(std::move(dataset)),
        images_(*as_images(*dataset_)),
        device_(device),
        dtype_(scalar_type(options.image_dtype)),
        slots_(static_cast<size_t>(num_slots)),
        decoder_(make_region_decoder(options.jpeg_decoder,
                                     {.images = images_, .slots = slots_, .device = device})) {
    if (max_batch > 65535) {
      throw SettingsError(concat("loader.batch_size=", max_batch,
                                 " exceeds the 65535 images that the GPU makes at once; fix: set a "
                                 "smaller one, or loader.device_transform=off"));
    }
    const double side = images_.transform().image_size();
    // Allocated once, here: page-locking is slow and waits for the device.
    for (RegionSlot& slot : slots_) {
      slot.reserve(max_batch * static_cast<int64_t>(sizeof(DeviceRegion)),
                   static_cast<int64_t>(static_cast<double>(max_batch) * side * side * 3 * kRoom),
                   uses_pinned_memory(device, options));
    }
  }

  void resize(int slot, int64_t num_samples) override { decoder_->resize(slot, num_samples); }
  void fill(int slot, int64_t place, int64_t index, int64_t epoch) override {
    decoder_->fill(slot, place, index, epoch);
  }
  void finish(int slot) override { decoder_->finish(slot); }

  Batch take(int slot) override {
    RegionSlot& s = slots_[static_cast<size_t>(slot)];
    const int64_t used = s.used_bytes();
    int64_t total = used;
    for (const DecodedRegion& sample : s.samples()) {
      total += is_overflow(sample) ? aligned(std::ssize(sample.overflow)) : 0;
    }
    const at::Tensor block =
        at::empty({total}, at::TensorOptions().device(device_).dtype(at::kByte));
    const auto* on_device = block.const_data_ptr<uint8_t>();
    auto* regions = reinterpret_cast<DeviceRegion*>(s.block().mutable_data_ptr<uint8_t>());
    int64_t end = used;
    for (DecodedRegion& sample : s.samples()) {
      const uint8_t* pixels = sample.on_device;
      if (is_overflow(sample)) {
        const int64_t size = std::ssize(sample.overflow);
        pixels = on_device + end;
        block.narrow(0, end, size)
            .copy_(at::from_blob(sample.overflow.data(), {size}, at::kByte), /*non_blocking=*/true);
        end += aligned(size);
      } else if (sample.offset >= 0) {
        pixels = on_device + sample.offset;
      }
      *regions++ = describe(sample, pixels);
    }
    block.narrow(0, 0, used).copy_(s.block().narrow(0, 0, used), /*non_blocking=*/true);
    return make_batch(s, on_device);
  }

  bool builds_on_device() const override { return true; }

 private:
  static bool is_overflow(const DecodedRegion& sample) {
    return sample.offset < 0 && sample.on_device == nullptr;
  }

  DeviceRegion describe(const DecodedRegion& sample, const uint8_t* pixels) const {
    const RegionPlan& plan = sample.plan;
    return {.pixels = pixels,
            .row_bytes = int64_t{plan.region.width} * 3,
            .x = plan.region.x,
            .y = plan.region.y,
            .columns = plan.columns,
            .rows = plan.rows,
            .target = sample.target,
            .cutout_x = plan.cutout_x,
            .cutout_y = plan.cutout_y,
            .cutout = plan.cutout ? images_.transform().cutout() : 0,
            .flip = plan.flip,
            .same_size = plan.same_size};
  }

  // Turns the slot's samples, whose descriptions are at `on_device`, into a batch on the current
  // stream.
  Batch make_batch(RegionSlot& s, const uint8_t* on_device) const {
    const ImageTransform& transform = images_.transform();
    const int side = transform.image_size();
    const auto num_images = static_cast<int>(s.samples().size());
    int stride = 1;
    for (const DecodedRegion& sample : s.samples()) {
      stride = std::max({stride, max_taps(sample.plan.columns), max_taps(sample.plan.rows)});
    }
    const auto options = at::TensorOptions().device(device_);
    const auto format =
        transform.channels_last() ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
    Batch batch{
        at::empty({num_images, transform.channels(), side, side}, options.dtype(dtype_), format),
        at::empty({num_images}, options.dtype(at::kLong))};
    const at::Tensor taps =
        at::empty({region_taps_bytes(num_images, side, stride)}, options.dtype(at::kByte));
    check_cuda(launch_region_batch({.regions = reinterpret_cast<const DeviceRegion*>(on_device),
                                    .num_images = num_images,
                                    .size = side,
                                    .channels = transform.channels(),
                                    .stride = stride,
                                    .taps = taps.mutable_data_ptr(),
                                    .data = batch.data.mutable_data_ptr(),
                                    .target = batch.target.mutable_data_ptr<int64_t>()},
                                   transform.normalisation(), kernel_dtype(dtype_),
                                   transform.channels_last(),
                                   c10::cuda::getCurrentCUDAStream(device_.index())),
               "the kernel that resizes a batch of images");
    return batch;
  }

  std::shared_ptr<const Dataset> dataset_;
  const ImageDataset& images_;
  at::Device device_;
  at::ScalarType dtype_;
  std::vector<RegionSlot> slots_;
  std::unique_ptr<RegionDecoder> decoder_;
};

}  // namespace

std::unique_ptr<BatchBuilder<Batch>> make_region_builder(std::shared_ptr<const Dataset> dataset,
                                                         at::Device device,
                                                         const LoaderOptions& options,
                                                         int num_slots, int64_t max_batch) {
  return std::make_unique<RegionBuilder>(std::move(dataset), device, options, num_slots, max_batch);
}

}  // namespace ddp::detail
