// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/cuda_check.hpp"
#include "data/images/batch_builders.hpp"
#include "data/images/jpeg.hpp"
#include "data/images/jpeg_scan.hpp"
#include "data/images/nvjpeg.hpp"
#include "data/images/resample_kernels.hpp"
#include "data/sources/image_dataset.hpp"
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
// If nvJPEG refuses a whole batch of at least this many images, it is not used again.
constexpr size_t kMinRefusedBatch = 8;

int64_t aligned(int64_t num_bytes, int64_t to = kAlign) {
  return (num_bytes + to - 1) / to * to;
}

/// Decodes on the loader's threads or on the GPU's JPEG engines. The thread that finishes a batch
/// waits for the engines, which work on two batches at a time.
class RegionBuilder final : public BatchBuilder<Batch> {
 public:
  RegionBuilder(std::shared_ptr<const Dataset> dataset, at::Device device,
                const LoaderOptions& options, int num_slots, int64_t max_batch)
      : dataset_(std::move(dataset)),
        images_(*as_images(*dataset_)),
        device_(device),
        dtype_(scalar_type(options.image_dtype)),
        header_bytes_(aligned(max_batch * static_cast<int64_t>(sizeof(DeviceRegion)))),
        slots_(static_cast<size_t>(num_slots)),
        decoders_(open_decoders(device, options, images_.transform().channels())) {
    if (max_batch > 65535) {
      throw SettingsError(concat("loader.batch_size=", max_batch,
                                 " exceeds the 65535 images that the GPU makes at once; fix: set a "
                                 "smaller one, or loader.device_transform=off"));
    }
    const double side = images_.transform().image_size();
    capacity_ =
        header_bytes_ +
        aligned(static_cast<int64_t>(static_cast<double>(max_batch) * side * side * 3 * kRoom));
    // Allocated once, here: page-locking is slow and waits for the device.
    const bool pinned = uses_pinned_memory(device, options);
    for (Slot& slot : slots_) {
      slot.block =
          at::empty({capacity_}, at::TensorOptions().dtype(at::kByte).pinned_memory(pinned));
      slot.memory = slot.block.mutable_data_ptr<uint8_t>();
    }
  }

  void resize(int slot, int64_t num_samples) override {
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
    if (nvjpeg_disabled_) {
      s.on_device.reset();
    }
  }

  void fill(int slot, int64_t place, int64_t index, int64_t epoch) override {
    Slot& s = at(slot);
    if (decoders_.empty() || !keep_encoded(s, place, index, epoch)) {
      decode_on_host(s, place, index, epoch);
    }
  }

  void finish(int slot) override {
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
      if (refused.size() == places.size() && refused.size() >= kMinRefusedBatch) {
        disable_nvjpeg(concat("nvJPEG refused a whole batch of ", refused.size(), " images"));
      } else {
        remember_refused(s, refused);
      }
      decode_again_on_host(s, refused);
      grow(s, decoder);
    } catch (const c10::OutOfMemoryError&) {
      disable_nvjpeg(
          "the GPU has no memory left for the images; fix: lower loader.prefetch_batches");
      s.is_on_device = false;
      s.on_device.reset();
      decode_again_on_host(s, places);
    }
  }

  Batch take(int slot) override {
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
    return make_batch(s, block.const_data_ptr<uint8_t>());
  }

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
  uint8_t* allocate(Slot& slot, int64_t num_bytes) const {
    int64_t offset = slot.used.load();
    do {
      if (offset + num_bytes > capacity_) {
        return nullptr;
      }
    } while (!slot.used.compare_exchange_weak(offset, offset + aligned(num_bytes)));
    return slot.memory + offset;
  }

  void describe(Slot& slot, int64_t place, const RegionPlan& plan, int64_t offset,
                int64_t target) const {
    slot.regions()[place] = {.offset = offset,
                             .row_bytes = int64_t{plan.region.width} * 3,
                             .x = plan.region.x,
                             .y = plan.region.y,
                             .columns = plan.columns,
                             .rows = plan.rows,
                             .target = target,
                             .cutout_x = plan.cutout_x,
                             .cutout_y = plan.cutout_y,
                             .cutout = plan.cutout ? images_.transform().cutout() : 0,
                             .flip = plan.flip,
                             .same_size = plan.same_size};
  }

  void decode_on_host(Slot& s, int64_t place, int64_t index, int64_t epoch) {
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

  /// False: the GPU must not decode the sample's file.
  bool keep_encoded(Slot& s, int64_t place, int64_t index, int64_t epoch) {
    auto& encoded = s.encoded[static_cast<size_t>(place)];
    // Colours decoded by the engines are not exact.
    if (nvjpeg_disabled_ || is_refused(index) || images_.transform().is_exact()) {
      return false;
    }
    encoded.index = index;
    encoded.epoch = epoch;
    const int64_t target = images_.read_file(index, [&](const std::vector<uint8_t>& bytes,
                                                        const DataSource&,
                                                        const ImageHeader& header) {
      const RegionPlan plan = images_.transform().plan(
          header.width, header.height, static_cast<uint64_t>(epoch), static_cast<uint64_t>(index));
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

  /// Assigns overflow samples without a place one after all others and returns the total bytes. The
  /// block accepts no more samples then.
  int64_t lay_out_overflow(Slot& s) {
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

  /// Decodes the samples at `places` on the GPU and returns those that nvJPEG refused. Throws
  /// c10::OutOfMemoryError, also if nvJPEG is out of memory, and the errors of NvJpeg::decode.
  std::vector<int64_t> decode_on_device(Slot& s, const std::vector<int64_t>& places,
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
           const NvJpegAnswer answer = decoder.nvjpeg->decode(
               std::span(images).subspan(first, last - first), decoder.stream);
           if (answer == NvJpegAnswer::NoMemory) {  // no bisection: it would repeat for every batch
             s.end = end_on_host;
             TORCH_CHECK_WITH(OutOfMemoryError, false, "nvJPEG is out of memory");
           }
           return answer == NvJpegAnswer::Decoded;
         })) {
      refused.push_back(places[i]);
    }
    return refused;
  }

  // Turns the slot's block, copied to `on_device`, into a batch on the current stream.
  Batch make_batch(const Slot& s, const uint8_t* on_device) const {
    const ImageTransform& transform = images_.transform();
    const int side = transform.image_size();
    int stride = 1;
    for (int64_t i = 0; i < s.num_samples; ++i) {
      const DeviceRegion& region = s.regions()[i];
      stride = std::max({stride, max_taps(region.columns), max_taps(region.rows)});
    }
    const auto options = at::TensorOptions().device(device_);
    const auto format =
        transform.channels_last() ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
    Batch batch{
        at::empty({s.num_samples, transform.channels(), side, side}, options.dtype(dtype_), format),
        at::empty({s.num_samples}, options.dtype(at::kLong))};
    const auto num_images = static_cast<int>(s.num_samples);
    const at::Tensor taps =
        at::empty({region_taps_bytes(num_images, side, stride)}, options.dtype(at::kByte));
    check_cuda(launch_region_batch({.regions = reinterpret_cast<const DeviceRegion*>(on_device),
                                    .pixels = on_device,
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

  /// Decodes the rest of a batch on the loader's last thread.
  void decode_again_on_host(Slot& s, const std::vector<int64_t>& places) {
    for (int64_t place : places) {
      const auto& encoded = s.encoded[static_cast<size_t>(place)];
      try {
        decode_on_host(s, place, encoded.index, encoded.epoch);
      } catch (...) {
        rethrow_with_sample(encoded.index, encoded.epoch);
      }
    }
  }

  /// Grows on_device to the size of the layout and keeps its contents.
  void grow(Slot& s, const DeviceDecoder& decoder) {
    const int64_t held = s.end;
    const int64_t total = lay_out_overflow(s);
    if (s.on_device.numel() < total) {
      const at::Tensor larger = at::empty({total}, s.on_device.options());
      larger.narrow(0, 0, held).copy_(s.on_device.narrow(0, 0, held), /*non_blocking=*/true);
      decoder.stream.synchronize();
      s.on_device = larger;
    }
  }

  void remember_refused(const Slot& s, const std::vector<int64_t>& places) {
    const std::lock_guard lock(mutex_);
    for (int64_t place : places) {
      const auto& encoded = s.encoded[static_cast<size_t>(place)];
      const bool is_new = refused_.insert(encoded.index).second;
      const size_t count = refused_.size();
      // Warns at counts 1, 2, 4, 8, …
      if (is_new && (count & (count - 1)) == 0) {
        log_warning(concat("nvJPEG refuses sample ", encoded.index,
                           ", which libjpeg-turbo decodes (", count, " of this data set so far)"));
      }
    }
  }

  bool is_refused(int64_t index) {
    const std::lock_guard lock(mutex_);
    return refused_.count(index) != 0;
  }

  /// Logs `reason`; the loader's threads decode all later samples.
  void disable_nvjpeg(const std::string& reason) {
    nvjpeg_disabled_ = true;
    warn_cpu_decodes(reason);
  }

  static std::vector<std::unique_ptr<DeviceDecoder>> open_decoders(at::Device device,
                                                                   const LoaderOptions& options,
                                                                   int channels) {
    std::vector<std::unique_ptr<DeviceDecoder>> decoders;
    if (options.jpeg_decoder == JpegDecoder::Cpu) {
      return decoders;
    }
    if (channels == 1) {
      warn_cpu_decodes("data.channels=1 makes images grey on the CPU");
      return decoders;
    }
    const c10::cuda::CUDAGuard guard(device);
    // A high-priority stream: nvJPEG's small kernels would otherwise wait for a step's large ones.
    // Two batches at a time, since one leaves the engines idle between its stages.
    for (int i = 0; i < 2; ++i) {
      std::string reason;
      auto nvjpeg = NvJpeg::open(reason);
      if (!nvjpeg) {
        warn_cpu_decodes(reason);
        return {};
      }
      auto stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index());
      decoders.push_back(std::make_unique<DeviceDecoder>(std::move(nvjpeg), stream));
    }
    return decoders;
  }

  std::shared_ptr<const Dataset> dataset_;
  const ImageDataset& images_;
  at::Device device_;
  at::ScalarType dtype_;
  int64_t header_bytes_;
  int64_t capacity_;
  std::vector<Slot> slots_;
  std::vector<std::unique_ptr<DeviceDecoder>>
      decoders_;  // shared by the slots; empty: threads decode
  std::atomic<bool> nvjpeg_disabled_{false};
  std::mutex mutex_;
  std::set<int64_t> refused_;  // samples that nvJPEG refused; not tried again in later epochs
};

}  // namespace

std::unique_ptr<BatchBuilder<Batch>> make_region_builder(std::shared_ptr<const Dataset> dataset,
                                                         at::Device device,
                                                         const LoaderOptions& options,
                                                         int num_slots, int64_t max_batch) {
  return std::make_unique<RegionBuilder>(std::move(dataset), device, options, num_slots, max_batch);
}

}  // namespace ddp::detail
