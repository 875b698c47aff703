// SPDX-License-Identifier: Apache-2.0
#include "data/region_builder.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "data/batch_memory.hpp"
#include "data/jpeg_scan.hpp"
#include "data/kernel_dtype.hpp"
#include "data/sample_error.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/detail/check.hpp"

namespace ddp::detail {

namespace {

// Size of a slot's block in multiples of the output's pixels. The shorter side of a region decoded
// at 1/2, 1/4 or 1/8 is one to two times the output's side. Pixels that do not fit cost an
// additional copy through the driver's buffer.
constexpr double kRoom = 2.5;

constexpr int64_t kAlign = 16;
// Alignment of images decoded on the GPU.
constexpr int64_t kDeviceAlign = 256;
// If nvJPEG refuses all of at least this many images of a batch, it is not used again.
constexpr size_t kHopeless = 8;

int64_t aligned(int64_t num_bytes, int64_t to = kAlign) {
  return (num_bytes + to - 1) / to * to;
}

}  // namespace

DeviceRegion describe_region(const RegionPlan& plan, int cutout, int64_t target) {
  DeviceRegion region;
  region.row_bytes = int64_t{plan.region.width} * 3;
  region.x = plan.region.x;
  region.y = plan.region.y;
  region.columns = plan.columns;
  region.rows = plan.rows;
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
      images_(*as_images(*dataset_)),
      device_(device),
      finisher_(images_.transform(), device, options.image_dtype),
      header_bytes_(aligned(max_batch * static_cast<int64_t>(sizeof(DeviceRegion)))),
      slots_(static_cast<size_t>(num_slots)),
      decoders_(open_decoders(device, options)) {
  if (max_batch > 65535) {
    throw SettingsError(concat("loader.batch_size=", max_batch,
                               ": the GPU makes batches of at most 65535 images; give less, or "
                               "loader.device_transform=off"));
  }
  const double side = images_.transform().image_size();
  capacity_ =
      header_bytes_ +
      aligned(static_cast<int64_t>(static_cast<double>(max_batch) * side * side * 3 * kRoom));
  // Allocated once, here: page-locking is slow and waits for the device.
  const bool pinned = uses_pinned_memory(device, options);
  for (Slot& slot : slots_) {
    slot.block = at::empty({capacity_}, at::TensorOptions().dtype(at::kByte).pinned_memory(pinned));
    slot.memory = slot.block.mutable_data_ptr<uint8_t>();
  }
}

std::vector<std::unique_ptr<RegionBuilder::DeviceDecoder>> RegionBuilder::open_decoders(
    at::Device device, const LoaderOptions& options) {
  std::vector<std::unique_ptr<DeviceDecoder>> decoders;
  if (options.jpeg_decoder == JpegDecoder::Cpu) {
    return decoders;
  }
  const c10::cuda::CUDAGuard guard(device);
  // A high-priority stream: nvJPEG's small kernels would otherwise wait for a step's large ones.
  // Two batches at a time, since one leaves the engines idle between its stages.
  for (int i = 0; i < 2; ++i) {
    std::string reason;
    auto nvjpeg = NvJpeg::open(reason);
    if (!nvjpeg) {
      say_cpu_decodes(reason);
      return {};
    }
    auto stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index());
    decoders.push_back(std::make_unique<DeviceDecoder>(std::move(nvjpeg), stream));
  }
  return decoders;
}

void RegionBuilder::resize(int slot, int64_t num_samples) {
  Slot& s = at(slot);
  s.num_samples = num_samples;
  s.used = header_bytes_;
  s.overflow.clear();
  s.overflow.resize(static_cast<size_t>(num_samples));
  s.encoded.resize(decoders_.empty() ? 0 : static_cast<size_t>(num_samples));
  for (Encoded& encoded : s.encoded) {
    encoded.bytes.clear();
  }
  s.num_block_bytes = 0;
  s.is_on_device = false;
  if (gave_up_) {
    s.on_device.reset();
  }
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

void RegionBuilder::describe(Slot& slot, int64_t place, const RegionPlan& plan, int64_t offset,
                             int64_t target) const {
  const auto& transform = images_.transform();
  slot.regions()[place] = describe_region(plan, transform.cutout(), target);
  slot.regions()[place].offset = offset;
}

void RegionBuilder::fill(int slot, int64_t place, int64_t index, int64_t epoch) {
  Slot& s = at(slot);
  if (decoders_.empty() || !keep_encoded(s, place, index, epoch)) {
    decode_on_host(s, place, index, epoch);
  }
}

void RegionBuilder::decode_on_host(Slot& s, int64_t place, int64_t index, int64_t epoch) {
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
  describe(s, place, plan, offset, target);
}

bool RegionBuilder::keep_encoded(Slot& s, int64_t place, int64_t index, int64_t epoch) {
  auto& encoded = s.encoded[static_cast<size_t>(place)];
  // Colours decoded by the engines are not exact.
  if (gave_up_ || is_refused(index) || images_.transform().is_exact()) {
    return false;
  }
  encoded.index = index;
  encoded.epoch = epoch;
  const int64_t target = images_.read_file(
      index, [&](const std::vector<uint8_t>& bytes, const DataSource&, const ImageHeader& header) {
        const RegionPlan plan =
            images_.transform().plan(header.width, header.height, static_cast<uint64_t>(epoch),
                                     static_cast<uint64_t>(index));
        // Decoding at 1/2 or less is cheap on the CPU. The engines decode only at full size, with 4
        // to 64 times the memory.
        if (plan.denominator == 1 && is_plain_baseline(bytes)) {
          encoded.plan = plan;
          encoded.bytes = bytes;
        }
      });
  if (encoded.bytes.empty()) {
    return false;
  }
  describe(s, place, encoded.plan, /*offset=*/-1, target);
  return true;
}

int64_t RegionBuilder::lay_out_overflow(Slot& s) {
  if (s.num_block_bytes == 0) {
    s.end = s.num_block_bytes = s.used.exchange(capacity_);
  }
  for (int64_t i = 0; i < s.num_samples; ++i) {
    const auto& overflow = s.overflow[static_cast<size_t>(i)];
    if (!overflow.empty() && s.regions()[i].offset < 0) {
      s.regions()[i].offset = s.end;
      s.end += aligned(static_cast<int64_t>(overflow.size()));
    }
  }
  return s.end;
}

std::vector<int64_t> RegionBuilder::decode_on_device(Slot& s, const std::vector<int64_t>& places,
                                                     DeviceDecoder& decoder) {
  std::vector<NvJpegImage> images;
  const int64_t end_on_host = lay_out_overflow(s);
  int64_t total = end_on_host;
  for (int64_t place : places) {
    const auto& [bytes, plan, index, epoch] = s.encoded[static_cast<size_t>(place)];
    total = aligned(total, kDeviceAlign);
    s.regions()[place].offset = total;
    total += aligned(int64_t{plan.region.width} * plan.region.height * 3);
    images.push_back({.bytes = &bytes, .region = plan.region});
  }
  // The slot was released, so its old contents are unused.
  if (!s.on_device.defined() || s.on_device.numel() < total) {
    s.on_device.reset();
    s.on_device =
        at::empty({total + total / 4}, at::TensorOptions().device(device_).dtype(at::kByte));
  }
  s.end = total;
  s.is_on_device = true;
  for (size_t i = 0; i < images.size(); ++i) {
    images[i].out = s.on_device.mutable_data_ptr<uint8_t>() + s.regions()[places[i]].offset;
  }
  const std::lock_guard lock(decoder.mutex);
  std::vector<int64_t> refused;
  for (size_t i : refused_images(images.size(), [&](size_t first, size_t last) {
         const NvJpegAnswer answer =
             decoder.nvjpeg->decode(std::span(images).subspan(first, last - first), decoder.stream);
         if (answer == NvJpegAnswer::NoMemory) {  // no bisection: it would repeat for every batch
           s.end = end_on_host;
           TORCH_CHECK_WITH(OutOfMemoryError, false, "nvJPEG gets no memory");
         }
         return answer == NvJpegAnswer::Decoded;
       })) {
    refused.push_back(places[i]);
  }
  return refused;
}

void RegionBuilder::decode_late(Slot& s, const std::vector<int64_t>& places) {
  for (int64_t place : places) {
    const auto& encoded = s.encoded[static_cast<size_t>(place)];
    try {
      decode_on_host(s, place, encoded.index, encoded.epoch);
    } catch (...) {
      rethrow_with_sample(encoded.index, encoded.epoch);
    }
  }
}

void RegionBuilder::grow(Slot& s, const DeviceDecoder& decoder) {
  const int64_t held = s.end;
  const int64_t total = lay_out_overflow(s);
  if (s.on_device.numel() < total) {
    const at::Tensor larger = at::empty({total}, s.on_device.options());
    larger.narrow(0, 0, held).copy_(s.on_device.narrow(0, 0, held), /*non_blocking=*/true);
    decoder.stream.synchronize();
    s.on_device = larger;
  }
}

void RegionBuilder::finish(int slot) {
  Slot& s = at(slot);
  std::vector<int64_t> places;
  for (size_t i = 0; i < s.encoded.size(); ++i) {
    if (!s.encoded[i].bytes.empty()) {
      places.push_back(static_cast<int64_t>(i));
    }
  }
  if (places.empty()) {
    return;
  }
  auto& decoder = *decoders_[static_cast<size_t>(slot) % decoders_.size()];
  const c10::cuda::CUDAStreamGuard guard(decoder.stream);
  try {
    const auto refused = decode_on_device(s, places, decoder);
    if (refused.size() == places.size() && refused.size() >= kHopeless) {
      give_up(concat("nvJPEG refused a whole batch of ", refused.size(), " images"));
    } else {
      remember_refused(s, refused);
    }
    decode_late(s, refused);
    grow(s, decoder);
  } catch (const c10::OutOfMemoryError&) {
    give_up("the GPU has no memory left for its images (lower loader.prefetch_batches)");
    s.is_on_device = false;
    s.on_device.reset();
    decode_late(s, places);
  }
}

void RegionBuilder::remember_refused(const Slot& s, const std::vector<int64_t>& places) {
  const std::lock_guard lock(mutex_);
  for (int64_t place : places) {
    const auto& encoded = s.encoded[static_cast<size_t>(place)];
    const bool is_new = refused_.insert(encoded.index).second;
    const size_t count = refused_.size();
    // Warns at counts 1, 2, 4, 8, …
    if (is_new && (count & (count - 1)) == 0) {
      log_warning(concat("nvJPEG refuses sample ", encoded.index, ", which libjpeg-turbo decodes (",
                         count, " of this data set so far)"));
    }
  }
}

bool RegionBuilder::is_refused(int64_t index) {
  const std::lock_guard lock(mutex_);
  return refused_.count(index) != 0;
}

void RegionBuilder::give_up(const std::string& reason) {
  gave_up_ = true;
  say_cpu_decodes(reason);
}

Batch RegionBuilder::take(int slot) {
  Slot& s = at(slot);
  const int64_t total = lay_out_overflow(s);
  const int64_t used = s.num_block_bytes;
  const at::Tensor block =
      s.is_on_device ? s.on_device
                     : at::empty({total}, at::TensorOptions().device(device_).dtype(at::kByte));
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

std::unique_ptr<BatchBuilder<Batch>> make_region_builder(std::shared_ptr<const Dataset> dataset,
                                                         at::Device device,
                                                         const LoaderOptions& options,
                                                         int num_slots, int64_t max_batch) {
  return std::make_unique<RegionBuilder>(std::move(dataset), device, options, num_slots, max_batch);
}

}  // namespace ddp::detail
