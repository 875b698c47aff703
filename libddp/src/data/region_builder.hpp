// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <vector>

#include "data/image_dataset.hpp"
#include "data/resample_kernels.hpp"
#include "ddp/data/loader_engine.hpp"

namespace ddp::detail {

/// What a kernel has to know of a sample whose pixels are rows of `row_bytes`, from the plan's
/// region on.
DeviceRegion describe_region(const RegionPlan& plan, int image_size, int cutout, int64_t target);

/// Turns pixels in device memory into a batch, on the current stream.
class RegionFinisher {
 public:
  RegionFinisher(const ImageTransform& transform, at::Device device, ImageDtype dtype);
  /// `regions` is in host memory too (for the widest filter), at `device_regions` on the device.
  Batch finish(const DeviceRegion* regions, int64_t num_samples, const DeviceRegion* device_regions,
               const uint8_t* device_pixels) const;

 private:
  const ImageTransform& transform_;
  at::Device device_;
  at::ScalarType dtype_;
  Normalisation normalisation_;
};

/// Decodes on the loader's threads.
class RegionBuilder : public DeviceBuilder {
 public:
  RegionBuilder(std::shared_ptr<const Dataset> dataset, at::Device device,
                const LoaderOptions& options, int num_slots, int64_t max_batch);
  void resize(int slot, int64_t num_samples) override;
  void fill(int slot, int64_t place, int64_t index, int64_t epoch) override;
  void finish(int) override {}
  Batch make(int slot) override;

 private:
  // One block: a DeviceRegion a sample, then pixels in the order in which threads asked for memory.
  struct Slot {
    at::Tensor block;
    uint8_t* memory = nullptr;
    std::atomic<int64_t> used{0};
    int64_t num_samples = 0;
    std::vector<std::vector<uint8_t>> overflow;  // of samples the block had no room for
    DeviceRegion* regions() const { return reinterpret_cast<DeviceRegion*>(memory); }
  };
  Slot& at(int slot) { return slots_[static_cast<size_t>(slot)]; }
  /// Memory in the slot's block, or nullptr where it is full.
  uint8_t* allocate(Slot& slot, int64_t num_bytes) const;

  std::shared_ptr<const Dataset> dataset_;
  const ImageDataset& images_;
  at::Device device_;
  RegionFinisher finisher_;
  int64_t header_bytes_;
  int64_t capacity_;
  std::vector<Slot> slots_;
};

std::unique_ptr<DeviceBuilder> make_region_builder(std::shared_ptr<const Dataset> dataset,
                                                   at::Device device, const LoaderOptions& options,
                                                   int num_slots, int64_t max_batch);

}  // namespace ddp::detail
