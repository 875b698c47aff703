// SPDX-License-Identifier: Apache-2.0
// Chooses how a DataLoader makes the batches of the library's data sets:
//
//   make_resident_images()                 decoded images that fit in GPU memory
//   PrefetchSource of a RegionBuilder      image files that the GPU resizes
//                  of a DirectBuilder      examples of one shape, written straight into the batch
//                  of a CollatingBuilder   other examples, stacked
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <atomic>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "data/images/batch_builders.hpp"
#include "data/images/region_decoder.hpp"
#include "data/images/resident_images.hpp"
#include "data/sources/image_dataset.hpp"
#include "ddp/core/error.hpp"
#include "ddp/data/data_loader.hpp"
#include "ddp/detail/check.hpp"

namespace ddp {

void for_each_tensor(Batch& batch, const TensorVisitor& visit) {
  visit(batch.data);
  visit(batch.target);
}

Batch DefaultCollate::operator()(std::vector<Example> examples) const {
  std::vector<at::Tensor> data, target;
  for (Example& example : examples) {
    data.push_back(std::move(example.data));
    target.push_back(std::move(example.target));
  }
  return {at::stack(data), at::stack(target)};
}

namespace detail {
namespace {

/// Writes examples of a Dataset with a layout straight into one tensor per slot, optionally
/// page-locked.
class DirectBuilder final : public BatchBuilder<Batch> {
 public:
  DirectBuilder(std::shared_ptr<const Dataset> dataset, int num_slots, int64_t max_batch,
                bool pinned)
      : dataset_(std::move(dataset)),
        layout_(*dataset_->layout()),
        memory_shape_(layout_.shape),
        pinned_(pinned),
        slots_(static_cast<size_t>(num_slots)) {
    if (layout_.channels_last) {
      DDP_CHECK(layout_.shape.size() == 3, "channels_last needs [C, H, W]");
      memory_shape_ = {layout_.shape[1], layout_.shape[2], layout_.shape[0]};
    }
    num_values_ = std::accumulate(layout_.shape.begin(), layout_.shape.end(), int64_t{1},
                                  std::multiplies<int64_t>());
    if (pinned_) {
      // Allocated once, here: page-locking is slow, and no worker may call CUDA during a capture.
      for (Slot& slot : slots_) {
        allocate(slot, max_batch);
      }
    }
  }

  void resize(int slot, int64_t num_samples) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    if (!pinned_ && !may_reuse(s, num_samples)) {
      allocate(s, num_samples);
    }
    s.num_samples = num_samples;
    s.data_pointer = s.data.mutable_data_ptr<float>();
    s.target_pointer = s.target.mutable_data_ptr<int64_t>();
  }

  void fill(int slot, int64_t place, int64_t index, int64_t epoch) override {
    const Slot& s = slots_[static_cast<size_t>(slot)];
    dataset_->write(index, epoch, s.data_pointer + place * num_values_, s.target_pointer + place);
  }

  void finish(int) override {}
  /// [N, shape…] and [N]. Page-locked memory is valid until the slot's next resize(). Other memory
  /// belongs to the caller as long as a view of it exists.
  Batch take(int slot) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    const at::Tensor data = pinned_ ? s.data.narrow(0, 0, s.num_samples) : s.data;
    const at::Tensor target = pinned_ ? s.target.narrow(0, 0, s.num_samples) : s.target;
    return {layout_.channels_last ? data.permute({0, 3, 1, 2}) : data, target};
  }

 private:
  struct Slot {
    at::Tensor data;    // [max_batch, shape…] in memory order
    at::Tensor target;  // [max_batch]
    int64_t num_samples = 0;
    float* data_pointer = nullptr;
    int64_t* target_pointer = nullptr;
  };

  void allocate(Slot& slot, int64_t num_samples) const {
    std::vector<int64_t> shape{num_samples};
    shape.insert(shape.end(), memory_shape_.begin(), memory_shape_.end());
    slot.data = at::empty(shape, at::TensorOptions().dtype(at::kFloat).pinned_memory(pinned_));
    slot.target =
        at::empty({num_samples}, at::TensorOptions().dtype(at::kLong).pinned_memory(pinned_));
  }

  // Whether the training loop has released the slot's last batch and all views of it, so no new
  // reference can appear. New memory costs page faults, 0.5 ms per image at 224 px.
  static bool may_reuse(const Slot& slot, int64_t num_samples) {
    auto ours_alone = [](const at::Tensor& tensor) {
      return tensor.use_count() == 1 && tensor.storage().use_count() == 1;
    };
    if (!slot.data.defined() || slot.data.size(0) != num_samples || !ours_alone(slot.data) ||
        !ours_alone(slot.target)) {
      return false;
    }
    std::atomic_thread_fence(std::memory_order_acquire);  // their reads come before our writes
    return true;
  }

  std::shared_ptr<const Dataset> dataset_;
  ExampleLayout layout_;
  std::vector<int64_t> memory_shape_;
  int64_t num_values_ = 1;
  bool pinned_;
  std::vector<Slot> slots_;
};

std::string why_not([[maybe_unused]] const Dataset& dataset, at::Device device) {
  if (!device.is_cuda()) {
    return concat("the device is ", device.str(), "; fix: set context.device=cuda");
  }
#ifdef DDP_HAS_CUDA
  const ImageDataset* images = as_images(dataset);
  if (images == nullptr) {
    return "the data set has no image files; fix: set loader.device_transform=auto";
  }
  if (const int num_ops = images->transform().num_rand_augment_ops(); num_ops > 0) {
    return concat("data.rand_augment_ops=", num_ops,
                  " runs on the CPU; fix: set loader.device_transform=auto, or "
                  "data.rand_augment_ops=0");
  }
  if (images->decoded() != nullptr) {
    return "the images are kept decoded; fix: set data.cache=off, or loader.device_resident=auto";
  }
  return {};
#else
  return "this build has no CUDA parts";
#endif
}

std::unique_ptr<BatchBuilder<Batch>> make_batch_builder(
    const std::shared_ptr<const Dataset>& dataset, const DistributedSampler& sampler,
    at::Device device, const LoaderOptions& options) {
  const int num_slots = LoaderEngine::num_slots(options);
  const int64_t max_batch = EpochBatches(sampler, options).max_size();
  if (auto builder = make_device_builder(dataset, device, options, num_slots, max_batch)) {
    return builder;
  }
  const bool pinned = uses_pinned_memory(device, options);
  if (dataset->layout()) {
    return std::make_unique<DirectBuilder>(dataset, num_slots, max_batch, pinned);
  }
  return std::make_unique<CollatingBuilder<const Dataset, DefaultCollate>>(
      dataset, DefaultCollate(), num_slots, pinned);
}

}  // namespace

std::unique_ptr<BatchBuilder<Batch>> make_device_builder(
    const std::shared_ptr<const Dataset>& dataset, at::Device device, const LoaderOptions& options,
    [[maybe_unused]] int num_slots, [[maybe_unused]] int64_t max_batch) {
  const std::string reason = why_not(*dataset, device);
  if (options.device_transform == DevicePolicy::On && !reason.empty()) {
    throw SettingsError(concat("loader.device_transform=on is impossible: ", reason));
  }
  if (options.device_transform == DevicePolicy::Off || !reason.empty()) {
    if (options.jpeg_decoder != JpegDecoder::Cpu) {
      warn_cpu_decodes(options.jpeg_decoder,
                       !reason.empty() ? reason : "loader.device_transform=off");
    }
    return nullptr;
  }
#ifdef DDP_HAS_CUDA
  return make_region_builder(dataset, device, options, num_slots, max_batch);
#else
  return nullptr;
#endif
}

std::unique_ptr<BatchSource<Batch>> make_batch_source(std::shared_ptr<const Dataset> dataset,
                                                      const DistributedSampler& sampler,
                                                      at::Device device,
                                                      const LoaderOptions& options,
                                                      DefaultCollate /*collate*/) {
  if (keeps_images_on_device(*dataset, device, options)) {
    return make_resident_images(dataset, sampler, device, options);
  }
  const auto to_image_dtype = [dtype = options.image_dtype](Batch& batch) {
    if (dtype != ImageDtype::Auto && batch.data.is_floating_point()) {
      batch.data = batch.data.to(scalar_type(dtype));
    }
  };
  return std::make_unique<PrefetchSource<Batch>>(
      make_batch_builder(dataset, sampler, device, options), sampler, device, options,
      to_image_dtype);
}

}  // namespace detail
}  // namespace ddp
