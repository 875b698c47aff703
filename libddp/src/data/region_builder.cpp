// SPDX-License-Identifier: Apache-2.0
#include "data/region_builder.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <utility>

#include "data/kernel_dtype.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

namespace {

// A slot's block has room for so many times the output's pixels. A part that is decoded at 1/2, 1/4
// or 1/8 has one to two times the output's side along its shorter side; what does not fit is slower
// by a copy through the driver's own buffer.
constexpr double kRoom = 2.5;

constexpr int64_t kAlign = 16;
int64_t aligned(int64_t num_bytes) {
  return (num_bytes + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

DeviceRegion describe_region(const RegionPlan& plan, int image_size, int cutout, int64_t target) {
  DeviceRegion region;
  region.row_bytes = int64_t{plan.region.width} * 3;
  region.x = plan.region.x;
  region.y = plan.region.y;
  region.columns = {plan.box.x, plan.box.width, plan.whole_width, image_size};
  region.rows = {plan.box.y, plan.box.height, plan.whole_height, image_size};
  region.target = target;
  region.cutout_x = plan.cutout_x;
  region.cutout_y = plan.cutout_y;
  region.cutout = plan.cutout ? cutout : 0;
  region.flip = plan.flip;
  region.as_it_is = plan.as_it_is;
  return region;
}

RegionFinisher::RegionFinisher(const ImageTransform& transform, at::Device device, ImageDtype dtype)
    : transform_(transform), device_(device), dtype_(scalar_type(dtype)) {
  for (size_t c = 0; c < 3; ++c) {
    normalisation_.scale[c] = transform.scale()[c];
    normalisation_.shift[c] = transform.shift()[c];
    normalisation_.mean[c] = transform.mean()[c];
    normalisation_.std[c] = transform.std()[c];
  }
}

Batch RegionFinisher::finish(const DeviceRegion* regions, int64_t num_samples,
                             const DeviceRegion* device_regions,
                             const uint8_t* device_pixels) const {
  const int64_t side = transform_.image_size();
  int stride = 1;
  for (int64_t i = 0; i < num_samples; ++i) {
    stride = std::max({stride, max_taps(regions[i].columns), max_taps(regions[i].rows)});
  }
  const auto on_device = at::TensorOptions().device(device_);
  const auto format =
      transform_.channels_last() ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  Batch batch{at::empty({num_samples, 3, side, side}, on_device.dtype(dtype_), format),
              at::empty({num_samples}, on_device.dtype(at::kLong))};
  const auto num_images = static_cast<int>(num_samples);
  const at::Tensor taps = at::empty(
      {region_taps_bytes(num_images, transform_.image_size(), stride)}, on_device.dtype(at::kByte));
  const cudaError_t status =
      launch_region_batch({.regions = device_regions,
                           .pixels = device_pixels,
                           .num_images = num_images,
                           .size = transform_.image_size(),
                           .stride = stride,
                           .taps = taps.mutable_data_ptr(),
                           .data = batch.data.mutable_data_ptr(),
                           .target = batch.target.mutable_data_ptr<int64_t>()},
                          normalisation_, kernel_dtype(dtype_), transform_.channels_last(),
                          c10::cuda::getCurrentCUDAStream(device_.index()));
  DDP_CHECK(status == cudaSuccess, cudaGetErrorString(status));
  return batch;
}

RegionBuilder::RegionBuilder(std::shared_ptr<const Dataset> dataset, at::Device device,
                             const LoaderOptions& options, int num_slots, int64_t max_batch)
    : dataset_(std::move(dataset)),
      images_(*dataset_->image_dataset()),
      device_(device),
      finisher_(images_.transform(), device, options.image_dtype),
      header_bytes_(aligned(max_batch * static_cast<int64_t>(sizeof(DeviceRegion)))),
      slots_(static_cast<size_t>(num_slots)) {
  if (max_batch > 65535) {
    throw SettingsError(concat("loader.batch_size=", max_batch,
                               ": the GPU makes batches of at most 65535 images; give less, or "
                               "loader.device_transform=off"));
  }
  const double side = images_.transform().image_size();
  capacity_ =
      header_bytes_ +
      aligned(static_cast<int64_t>(static_cast<double>(max_batch) * side * side * 3 * kRoom));
  // Once, here: page-locking is slow, and no worker may call CUDA while a graph is captured.
  const bool pinned = uses_pinned_memory(device, options);
  for (Slot& slot : slots_) {
    slot.block = at::empty({capacity_}, at::TensorOptions().dtype(at::kByte).pinned_memory(pinned));
    slot.memory = slot.block.mutable_data_ptr<uint8_t>();
  }
}

void RegionBuilder::resize(int slot, int64_t num_samples) {
  Slot& s = at(slot);
  s.num_samples = num_samples;
  s.used = header_bytes_;
  s.overflow.clear();
  s.overflow.resize(static_cast<size_t>(num_samples));
}

uint8_t* RegionBuilder::allocate(Slot& slot, int64_t num_bytes) const {
  int64_t offset = slot.used.load();
  do {
    if (offset + num_bytes > capacity_) {
      return nullptr;
    }
  } while (!slot.used.compare_exchange_weak(offset, offset + aligned(num_bytes)));
  return slot.memory + offset;
}

void RegionBuilder::fill(int slot, int64_t place, int64_t index, int64_t epoch) {
  Slot& s = at(slot);
  auto& overflow = s.overflow[static_cast<size_t>(place)];
  RegionPlan plan;
  int64_t offset = 0;
  const int64_t target = images_.read_region(index, epoch, plan, [&](const RegionPlan& p) {
    const int64_t num_bytes = int64_t{p.region.width} * p.region.height * 3;
    uint8_t* memory = allocate(s, num_bytes);
    offset = memory != nullptr ? memory - s.memory : -1;
    if (memory == nullptr) {
      overflow.resize(static_cast<size_t>(num_bytes));
      memory = overflow.data();
    }
    return memory;
  });
  if (offset >= 0) {
    overflow.clear();  // of a corrupt image that this one replaces
  }
  DeviceRegion region =
      describe_region(plan, images_.transform().image_size(), images_.transform().cutout(), target);
  region.offset = offset;
  s.regions()[place] = region;
}

Batch RegionBuilder::make(int slot) {
  Slot& s = at(slot);
  const int64_t used = s.used;
  int64_t total = used;
  for (int64_t i = 0; i < s.num_samples; ++i) {
    const auto& overflow = s.overflow[static_cast<size_t>(i)];
    if (!overflow.empty()) {
      s.regions()[i].offset = total;
      total += aligned(static_cast<int64_t>(overflow.size()));
    }
  }
  const at::Tensor block = at::empty({total}, at::TensorOptions().device(device_).dtype(at::kByte));
  block.narrow(0, 0, used).copy_(s.block.narrow(0, 0, used), /*non_blocking=*/true);
  for (int64_t i = 0; i < s.num_samples; ++i) {
    auto& overflow = s.overflow[static_cast<size_t>(i)];
    if (!overflow.empty()) {
      const auto size = static_cast<int64_t>(overflow.size());
      block.narrow(0, s.regions()[i].offset, size)
          .copy_(at::from_blob(overflow.data(), {size}, at::kByte), /*non_blocking=*/true);
    }
  }
  const auto* on_device = block.const_data_ptr<uint8_t>();
  return finisher_.finish(s.regions(), s.num_samples,
                          reinterpret_cast<const DeviceRegion*>(on_device), on_device);
}

std::unique_ptr<DeviceBuilder> make_region_builder(std::shared_ptr<const Dataset> dataset,
                                                   at::Device device, const LoaderOptions& options,
                                                   int num_slots, int64_t max_batch) {
  return std::make_unique<RegionBuilder>(std::move(dataset), device, options, num_slots, max_batch);
}

}  // namespace ddp::detail
