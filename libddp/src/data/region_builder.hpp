// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "data/image_dataset.hpp"
#include "data/nvjpeg.hpp"
#include "data/resample_kernels.hpp"
#include "ddp/data/dataset.hpp"
#include "ddp/detail/prefetch_source.hpp"

namespace ddp::detail {

/// Describes a sample to the kernel. Its pixels are rows of `row_bytes`, starting at the plan's
/// region.
DeviceRegion describe_region(const RegionPlan& plan, int cutout, int64_t target);

/// Turns pixels in device memory into a batch, on the current stream.
class RegionFinisher {
 public:
  RegionFinisher(const ImageTransform& transform, at::Device device, ImageDtype dtype);
  /// `regions` is in host memory (for the widest filter), its copy at `device_regions` on the
  /// device.
  Batch finish(const DeviceRegion* regions, int64_t num_samples, const DeviceRegion* device_regions,
               const uint8_t* device_pixels) const;

 private:
  const ImageTransform& transform_;
  at::Device device_;
  at::ScalarType dtype_;
  Normalisation normalisation_;
};

/// Decodes on the loader's threads or on the GPU's JPEG engines. The thread that finishes a batch
/// waits for the engines, which work on two batches at a time.
class RegionBuilder final : public BatchBuilder<Batch> {
 public:
  RegionBuilder(std::shared_ptr<const Dataset> dataset, at::Device device,
                const LoaderOptions& options, int num_slots, int64_t max_batch);
  void resize(int slot, int64_t num_samples) override;
  void fill(int slot, int64_t place, int64_t index, int64_t epoch) override;
  void finish(int slot) override;
  Batch take(int slot) override;
  bool builds_on_device() const override { return true; }

 private:
  struct DeviceDecoder {
    DeviceDecoder(std::unique_ptr<NvJpeg> opened, c10::cuda::CUDAStream of)
        : nvjpeg(std::move(opened)), stream(of) {}
    std::mutex mutex;
    std::unique_ptr<NvJpeg> nvjpeg;
    c10::cuda::CUDAStream stream;
  };
  /// A file that the GPU decodes; empty if the sample's pixels are in host memory.
  struct Encoded {
    std::vector<uint8_t> bytes;
    RegionPlan plan;
    int64_t index = 0;
    int64_t epoch = 0;
  };
  // One block: a DeviceRegion per sample, then pixels in order of allocation.
  struct Slot {
    at::Tensor block;
    uint8_t* memory = nullptr;
    std::atomic<int64_t> used{0};
    int64_t num_samples = 0;
    int64_t num_block_bytes = 0;                 // bytes of the block in use; 0 before the layout
    int64_t end = 0;                             // end of the layout
    std::vector<std::vector<uint8_t>> overflow;  // samples that did not fit in the block
    std::vector<Encoded> encoded;                // samples that the GPU decodes
    at::Tensor on_device;                        // block, overflow and pixels decoded on the GPU
    bool is_on_device = false;
    DeviceRegion* regions() const { return reinterpret_cast<DeviceRegion*>(memory); }
  };
  Slot& at(int slot) { return slots_[static_cast<size_t>(slot)]; }
  /// Memory in the slot's block, or nullptr if the block is full.
  uint8_t* allocate(Slot& slot, int64_t num_bytes) const;
  void describe(Slot& slot, int64_t place, const RegionPlan& plan, int64_t offset,
                int64_t target) const;
  void decode_on_host(Slot& slot, int64_t place, int64_t index, int64_t epoch);
  /// False: the GPU must not decode the sample's file.
  bool keep_encoded(Slot& slot, int64_t place, int64_t index, int64_t epoch);
  /// Assigns overflow samples without a place one after all others and returns the total bytes. The
  /// block accepts no more samples then.
  int64_t lay_out_overflow(Slot& slot);
  /// Decodes the samples at `places` on the GPU and returns those that nvJPEG refused. Throws
  /// c10::OutOfMemoryError, also if nvJPEG is out of memory, and the errors of NvJpeg::decode.
  std::vector<int64_t> decode_on_device(Slot& slot, const std::vector<int64_t>& places,
                                        DeviceDecoder& decoder);
  /// Decodes the rest of a batch on the loader's last thread.
  void decode_late(Slot& slot, const std::vector<int64_t>& places);
  /// Grows on_device to the size of the layout and keeps its contents.
  void grow(Slot& slot, const DeviceDecoder& decoder);
  void remember_refused(const Slot& slot, const std::vector<int64_t>& places);
  bool is_refused(int64_t index);
  /// Logs `reason`; the loader's threads decode all later samples.
  void give_up(const std::string& reason);
  static std::vector<std::unique_ptr<DeviceDecoder>> open_decoders(at::Device device,
                                                                   const LoaderOptions& options);

  std::shared_ptr<const Dataset> dataset_;
  const ImageDataset& images_;
  at::Device device_;
  RegionFinisher finisher_;
  int64_t header_bytes_;
  int64_t capacity_;
  std::vector<Slot> slots_;
  std::vector<std::unique_ptr<DeviceDecoder>>
      decoders_;  // shared by the slots; empty: threads decode
  std::atomic<bool> gave_up_{false};
  std::mutex mutex_;
  std::set<int64_t> refused_;  // samples that nvJPEG refused; not tried again in later epochs
};

std::unique_ptr<BatchBuilder<Batch>> make_region_builder(std::shared_ptr<const Dataset> dataset,
                                                         at::Device device,
                                                         const LoaderOptions& options,
                                                         int num_slots, int64_t max_batch);

}  // namespace ddp::detail
