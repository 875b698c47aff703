// SPDX-License-Identifier: Apache-2.0
#include "data/images/resident_images.hpp"

#include "data/sources/image_dataset.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/check.hpp"

#ifdef DDP_HAS_CUDA
#include <ATen/Context.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <limits>
#include <optional>
#include <utility>

#include "comm/cuda_check.hpp"
#include "data/images/augmentation_kernels.hpp"
#include "data/images/batch_builders.hpp"
#include "data/loader/batch_plan.hpp"
#include "data/loader/input_wait.hpp"
#endif

namespace ddp {

void for_each_tensor(PreparedBatch& batch, const TensorVisitor& visit) {
  visit(batch.place);
  visit(batch.size);
}

namespace detail {

std::string why_not_resident(const Dataset& dataset, at::Device device) {
  if (!device.is_cuda()) {
    return concat("the device is ", device.str(), "; fix: set context.device=cuda");
  }
#ifdef DDP_HAS_CUDA
  const ImageDataset* images = as_images(dataset);
  if (images == nullptr || !images->decoded()) {
    return "the data set has no decoded images of one size; fix: set data.cache=ram, or "
           "loader.device_resident=auto";
  }
  if (const int num_ops = images->transform().num_rand_augment_ops(); num_ops > 0) {
    return concat("data.rand_augment_ops=", num_ops,
                  " runs on the CPU; fix: set loader.device_resident=auto, or "
                  "data.rand_augment_ops=0");
  }
  const auto transform = images->transform().small_image_transform();
  if (!transform) {
    return "the images are resized for each batch; fix: set data.augment=pad_crop or none, with "
           "data.eval_resize=data.image_size";
  }
  if (transform->side > kMaxResidentSide) {
    return concat("data.image_size=", transform->side, " exceeds the limit of ", kMaxResidentSide,
                  " px");
  }
  return {};
#else
  (void)dataset;
  return "this build has no CUDA parts";
#endif
}

bool keeps_images_on_device(const Dataset& dataset, at::Device device,
                            const LoaderOptions& options) {
  if (options.device_resident == DevicePolicy::Off) {
    return false;
  }
  const std::string reason = why_not_resident(dataset, device);
  if (options.device_resident == DevicePolicy::On && !reason.empty()) {
    throw SettingsError(concat("loader.device_resident=on is impossible: ", reason));
  }
  if (!reason.empty()) {
    return false;
  }
  const int64_t side = dataset.layout()->shape[1];
  return options.device_resident == DevicePolicy::On ||
         dataset.size() * side * side * 3 <= options.device_resident_limit_mb * 1024 * 1024;
}

#ifdef DDP_HAS_CUDA
class ResidentImages final : public BatchSource<Batch>, public DeviceImageLoader {
 public:
  ResidentImages(const std::shared_ptr<const Dataset>& dataset, const DistributedSampler& sampler,
                 at::Device device, const LoaderOptions& options);

  /// Makes the batch on the current stream, in memory that the caller owns.
  Batch next() override;
  PreparedBatch prepare() override;
  Batch make(const PreparedBatch& prepared) const override;
  void restart(LoaderPlace place) override;
  LoaderPlace place() const override;
  double wait_ms() const override;
  DeviceImageLoader* device_images() override { return this; }

 private:
  struct State;
  std::unique_ptr<State> state_;
};

//   host thread   prepare() ………………… prepare() | end of the epoch: the next order is planned
//   stream        batch k   step k   batch k+1   step k+1 … | order ──> device
//   helper        plans the next epoch's order
//
// The stream that makes the batches also uploads the order, alternating between two halves.
// Prepared batches of the previous order may not be made yet.
struct ResidentImages::State {
  State(const ImageDataset& images, const DistributedSampler& original, const EpochBatches& of_rank,
        at::Device where, const LoaderOptions& opts)
      : options(opts),
        batches(of_rank),
        sampler(original),
        device(where),
        transform(*images.transform().small_image_transform()),
        channels_last(images.layout()->channels_last),
        dtype(scalar_type(opts.image_dtype)) {
    const int64_t n = images.size(), side = transform.side;
    auto upload = [&](const void* from, at::IntArrayRef sizes, at::ScalarType type) {
      return at::from_blob(const_cast<void*>(from), sizes, type).to(device);
    };
    pixels = upload(images.decoded()->pixels.data(), {n, side, side, 3}, at::kByte);
    std::vector<float> values;
    for (int c = 0; c < 3; ++c) {
      for (int v = 0; v < 256; ++v) {
        values.push_back(
            normalise_byte(static_cast<uint8_t>(v), transform.mean[c], transform.std[c]));
      }
    }
    table = upload(values.data(), {3, 256}, at::kFloat);
    labels = upload(images.decoded()->labels.data(), {n}, at::kLong);
    // A resumed epoch can begin at any place and is dealt again: one batch more than usual.
    capacity = batches.max_size() * (batches.count_after(0) + 1);
    DDP_CHECK(2 * capacity <= std::numeric_limits<int32_t>::max());
    order = at::empty({2 * capacity}, at::TensorOptions().device(device).dtype(at::kInt));
  }
  ~State() {
    if (following.valid()) {
      following.wait();
    }
  }

  EpochPlan plan(int64_t epoch, int64_t position) {
    return plan_epoch(sampler, epoch, position, batches.global_size(), options.drop_last);
  }

  void start(LoaderPlace place) {
    if (following.valid()) {
      following.get();
    }
    current = plan(place.epoch, place.position);
    if (current.batches.empty() && place.position > 0) {
      place = {place.epoch + 1, 0};
      current = plan(place.epoch, 0);
    }
    consumed = place;
    begin_plan();
  }

  void begin_plan() {
    next_batch = 0;
    offset = 0;
    must_upload = true;
    following = std::async(std::launch::async,
                           [this, epoch = current.epoch + 1] { return plan(epoch, 0); });
  }

  struct Next {
    BatchPlace place;
    int64_t size = 0;
  };

  // Returns the next batch after uploading its order. Consumes nothing: after an exception, here or
  // in make(), the next call returns the same batch.
  Next peek() {
    const c10::cuda::CUDAGuard guard(device);
    follow_current_stream();
    wait.forget();
    if (next_batch == current.batches.size()) {
      wait.begin();
      current = following.valid() ? following.get() : plan(current.epoch + 1, 0);
      begin_plan();
    }
    if (current.batches.empty()) {
      batches.fail_without_batch();
    }
    if (must_upload) {
      upload();
    }
    wait.end();
    return {{static_cast<int32_t>(half + offset), static_cast<int32_t>(current.epoch)},
            current.batches[next_batch].size};
  }

  // Hands the batch of peek() to the training loop.
  void consume() {
    const auto [size, end] = current.batches[next_batch++];
    const bool last = next_batch == current.batches.size();
    consumed = last ? LoaderPlace{current.epoch + 1, 0} : LoaderPlace{current.epoch, end};
    offset += size;
  }

  void upload() {
    const auto count = static_cast<int64_t>(current.indices.size());
    DDP_CHECK(count <= capacity, "an epoch's order is longer than planned");
    if (current.epoch > std::numeric_limits<int32_t>::max()) {
      throw SettingsError(concat("images in GPU memory: epoch ", current.epoch, " exceeds ",
                                 std::numeric_limits<int32_t>::max(),
                                 ", the largest; fix: set loader.device_resident=off"));
    }
    // The caching host allocator does not reuse this memory before the copy has ended.
    const at::Tensor staging =
        at::empty({count}, at::TensorOptions().dtype(at::kInt).pinned_memory(true));
    std::memcpy(staging.mutable_data_ptr<int32_t>(), current.indices.data(),
                current.indices.size() * sizeof(int32_t));
    const int64_t other = capacity - half;
    order.narrow(0, other, count).copy_(staging, /*non_blocking=*/true);
    half = other;
    must_upload = false;
  }

  // `device_place` replaces `place` if not null.
  Batch make(int64_t size, BatchPlace place, const BatchPlace* device_place) const {
    const c10::cuda::CUDAGuard guard(device);
    const auto on_device = at::TensorOptions().device(device);
    Batch batch{
        at::empty({size, transform.channels, transform.side, transform.side},
                  on_device.dtype(dtype),
                  channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous),
        at::empty({size}, on_device.dtype(at::kLong))};
    const ResidentSet set{pixels.const_data_ptr<uint8_t>(),
                          labels.const_data_ptr<int64_t>(),
                          order.const_data_ptr<int32_t>(),
                          table.const_data_ptr<float>(),
                          place,
                          device_place};
    check_cuda(launch_resident_batch(set, transform, size, kernel_dtype(dtype), channels_last,
                                     batch.data.mutable_data_ptr(),
                                     batch.target.mutable_data_ptr<int64_t>(),
                                     c10::cuda::getCurrentCUDAStream(device.index())),
               "the kernel that makes a batch of images in GPU memory");
    return batch;
  }

  // Orders a new current stream after the previous one, which uploads and reads the order.
  void follow_current_stream() {
    const auto now = c10::cuda::getCurrentCUDAStream(device.index());
    if (last_stream && *last_stream != now) {
      at::cuda::CUDAEvent event;
      event.record(*last_stream);
      event.block(now);
    }
    last_stream = now;
  }

  LoaderOptions options;
  EpochBatches batches;
  DistributedSampler sampler;  // plan()'s
  at::Device device;
  SmallImageTransform transform;
  bool channels_last;
  at::ScalarType dtype;
  at::Tensor pixels, labels, table, order;
  int64_t capacity = 0;  // of half of `order`
  int64_t half = 0;      // start of the current epoch's half
  EpochPlan current;
  std::future<EpochPlan> following;
  size_t next_batch = 0;
  int64_t offset = 0;       // of next_batch in current.indices
  bool must_upload = true;  // the device has an outdated order
  LoaderPlace consumed;
  InputWait wait{device};
  std::optional<c10::cuda::CUDAStream> last_stream;
};

ResidentImages::ResidentImages(const std::shared_ptr<const Dataset>& dataset,
                               const DistributedSampler& sampler, at::Device device,
                               const LoaderOptions& options) {
  const EpochBatches batches(sampler, options);
  if (device.index() < 0) {
    device = at::Device(at::kCUDA, c10::cuda::current_device());
  }
  state_ = std::make_unique<State>(*as_images(*dataset), sampler, batches, device, options);
  state_->start({sampler.epoch(), sampler.position()});
}

Batch ResidentImages::next() {
  const auto [place, size] = state_->peek();
  Batch batch = state_->make(size, place, nullptr);
  state_->consume();
  return batch;
}

PreparedBatch ResidentImages::prepare() {
  const auto [place, size] = state_->peek();
  static_assert(sizeof(place) == 2 * sizeof(float));
  PreparedBatch prepared{at::empty({2}, at::TensorOptions().dtype(at::kFloat)), size};
  std::memcpy(prepared.place.mutable_data_ptr(), &place, sizeof(place));
  state_->consume();
  return prepared;
}

Batch ResidentImages::make(const PreparedBatch& prepared) const {
  const State& s = *state_;
  const at::Tensor& place = prepared.place;
  if (!place.defined() || place.scalar_type() != at::kFloat || place.numel() != 2 ||
      !place.is_contiguous() || !(place.is_cpu() || place.device() == s.device) ||
      prepared.size < 1 || prepared.size > s.batches.max_size()) {
    throw SettingsError("DeviceImageLoader::make: prepare() of this loader did not make the batch");
  }
  BatchPlace on_host;
  if (place.is_cpu()) {
    std::memcpy(&on_host, place.const_data_ptr(), sizeof(on_host));
    return s.make(prepared.size, on_host, nullptr);
  }
  return s.make(prepared.size, on_host, static_cast<const BatchPlace*>(place.const_data_ptr()));
}

void ResidentImages::restart(LoaderPlace place) {
  state_->start(place);
}
LoaderPlace ResidentImages::place() const {
  return state_->consumed;
}
double ResidentImages::wait_ms() const {
  return state_->wait.milliseconds();
}

#endif

std::unique_ptr<BatchSource<Batch>> make_resident_images(
    const std::shared_ptr<const Dataset>& dataset, const DistributedSampler& sampler,
    at::Device device, const LoaderOptions& options) {
  if (const std::string reason = why_not_resident(*dataset, device); !reason.empty()) {
    throw SettingsError(concat("DeviceImageLoader: ", reason));
  }
#ifdef DDP_HAS_CUDA
  return std::make_unique<ResidentImages>(dataset, sampler, device, options);
#else
  (void)sampler, (void)options;
  throw InternalError("a build without CUDA keeps no images on a device");
#endif
}

}  // namespace detail
}  // namespace ddp
