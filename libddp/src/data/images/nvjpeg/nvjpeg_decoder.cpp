// SPDX-License-Identifier: Apache-2.0
#include "data/images/nvjpeg/nvjpeg_decoder.hpp"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "data/images/batch_builders.hpp"
#include "data/images/nvjpeg/jpeg_scan.hpp"
#include "data/images/nvjpeg/nvjpeg.hpp"
#include "data/sources/image_dataset.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {

namespace {

// Alignment of images decoded on the GPU.
constexpr int64_t kDeviceAlign = 256;
// If nvJPEG refuses a whole batch of at least this many images, it is not used again.
constexpr size_t kMinRefusedBatch = 8;

struct JpegEngine {
  JpegEngine(std::unique_ptr<NvJpeg> opened, c10::cuda::CUDAStream of)
      : nvjpeg(std::move(opened)), stream(of) {}
  std::mutex mutex;
  std::unique_ptr<NvJpeg> nvjpeg;
  c10::cuda::CUDAStream stream;
};
using JpegEngines = std::vector<std::unique_ptr<JpegEngine>>;

/// fill() keeps a sample's file, and finish() decodes all files of a batch. The thread that
/// finishes a batch waits for the engines, which work on two batches at a time.
class NvJpegDecoder final : public RegionDecoder {
 public:
  NvJpegDecoder(const RegionDecoderInputs& inputs, std::unique_ptr<RegionDecoder> cpu,
                JpegEngines engines)
      : images_(inputs.images),
        slots_(inputs.slots),
        device_(inputs.device),
        cpu_(std::move(cpu)),
        engines_(std::move(engines)),
        batches_(inputs.slots.size()) {}

  void resize(int slot, int64_t num_samples) override {
    cpu_->resize(slot, num_samples);
    EncodedBatch& batch = batches_[static_cast<size_t>(slot)];
    batch.files.resize(static_cast<size_t>(num_samples));
    for (EncodedFile& file : batch.files) {
      file.bytes.clear();
    }
    if (disabled_) {
      batch.pixels.reset();
    }
  }

  void fill(int slot, int64_t place, int64_t index, int64_t epoch) override {
    if (!keep_file(slot, place, index, epoch)) {
      cpu_->fill(slot, place, index, epoch);
    }
  }

  void finish(int slot) override {
    const EncodedBatch& batch = batches_[static_cast<size_t>(slot)];
    std::vector<int64_t> places;
    for (size_t i = 0; i < batch.files.size(); ++i) {
      if (!batch.files[i].bytes.empty()) {
        places.push_back(static_cast<int64_t>(i));
      }
    }
    // Decodes the rest of the batch on this thread.
    for (int64_t place : decode_on_device(slot, places)) {
      const EncodedFile& file = batch.files[static_cast<size_t>(place)];
      try {
        cpu_->fill(slot, place, file.index, file.epoch);
      } catch (...) {
        rethrow_with_sample(file.index, file.epoch);
      }
    }
    cpu_->finish(slot);
  }

 private:
  /// A file that the GPU decodes; empty if the CPU has decoded the sample.
  struct EncodedFile {
    std::vector<uint8_t> bytes;
    int64_t index = 0;
    int64_t epoch = 0;
  };
  struct EncodedBatch {
    std::vector<EncodedFile> files;
    at::Tensor pixels;  // of all files, on the GPU; grows
  };

  /// False: the GPU must not decode the sample's file.
  bool keep_file(int slot, int64_t place, int64_t index, int64_t epoch) {
    // Colours decoded by the engines are not exact.
    if (disabled_ || is_refused(index) || images_.transform().is_exact()) {
      return false;
    }
    EncodedFile& file = batches_[static_cast<size_t>(slot)].files[static_cast<size_t>(place)];
    file.index = index;
    file.epoch = epoch;
    DecodedRegion& region = slots_[static_cast<size_t>(slot)].sample(place);
    region.target = images_.read_file(index, [&](const std::vector<uint8_t>& bytes,
                                                 const DataSource&, const ImageHeader& header) {
      region.plan = images_.transform().plan(
          header.width, header.height, static_cast<uint64_t>(epoch), static_cast<uint64_t>(index));
      // Decoding at 1/2 or less is cheap on the CPU. The engines decode only at full size, with 4
      // to 64 times the memory.
      if (region.plan.denominator == 1 && is_plain_baseline(bytes)) {
        file.bytes = bytes;
      }
    });
    return !file.bytes.empty();
  }

  /// Decodes the files at `places` on the GPU and returns the places that are left to the CPU.
  /// Throws the errors of NvJpeg::decode.
  std::vector<int64_t> decode_on_device(int slot, const std::vector<int64_t>& places) {
    if (places.empty()) {
      return {};
    }
    try {
      const auto refused = refused_places(slot, places);
      if (refused.size() == places.size() && refused.size() >= kMinRefusedBatch) {
        disable(concat("nvJPEG refused a whole batch of ", refused.size(), " images"));
      } else {
        remember_refused(batches_[static_cast<size_t>(slot)], refused);
      }
      return refused;
    } catch (const c10::OutOfMemoryError&) {
      disable("the GPU has no memory left for the images; fix: lower loader.prefetch_batches");
      batches_[static_cast<size_t>(slot)].pixels.reset();
      return places;
    }
  }

  /// Decodes the files at `places` and returns those that nvJPEG refused. Throws
  /// c10::OutOfMemoryError, also if nvJPEG is out of memory, and the errors of NvJpeg::decode.
  std::vector<int64_t> refused_places(int slot, const std::vector<int64_t>& places) {
    JpegEngine& engine = *engines_[static_cast<size_t>(slot) % engines_.size()];
    const c10::cuda::CUDAStreamGuard guard(engine.stream);
    std::vector<NvJpegImage> images = allocate(slot, places);
    const std::lock_guard lock(engine.mutex);
    std::vector<int64_t> refused;
    for (size_t i : refused_images(images.size(), [&](size_t first, size_t last) {
           const NvJpegAnswer answer =
               engine.nvjpeg->decode(std::span(images).subspan(first, last - first), engine.stream);
           // No bisection without memory: it would repeat for every batch.
           TORCH_CHECK_WITH(OutOfMemoryError, answer != NvJpegAnswer::NoMemory,
                            "nvJPEG is out of memory");
           return answer == NvJpegAnswer::Decoded;
         })) {
      refused.push_back(places[i]);
    }
    return refused;
  }

  /// Gives each file at `places` its memory on the GPU, from the current stream's pool.
  std::vector<NvJpegImage> allocate(int slot, const std::vector<int64_t>& places) {
    EncodedBatch& batch = batches_[static_cast<size_t>(slot)];
    std::vector<NvJpegImage> images;
    std::vector<int64_t> offsets;
    int64_t total = 0;
    for (int64_t place : places) {
      const CropBox& region = slots_[static_cast<size_t>(slot)].sample(place).plan.region;
      images.push_back({.bytes = &batch.files[static_cast<size_t>(place)].bytes, .region = region});
      offsets.push_back(total);
      total += aligned(int64_t{region.width} * region.height * 3, kDeviceAlign);
    }
    // The slot was released, so its old contents are unused.
    if (!batch.pixels.defined() || batch.pixels.numel() < total) {
      batch.pixels.reset();
      batch.pixels =
          at::empty({total + total / 4}, at::TensorOptions().device(device_).dtype(at::kByte));
    }
    for (size_t i = 0; i < images.size(); ++i) {
      images[i].out = batch.pixels.mutable_data_ptr<uint8_t>() + offsets[i];
      slots_[static_cast<size_t>(slot)].sample(places[i]).on_device = images[i].out;
    }
    return images;
  }

  void remember_refused(const EncodedBatch& batch, const std::vector<int64_t>& places) {
    const std::lock_guard lock(mutex_);
    for (int64_t place : places) {
      const int64_t index = batch.files[static_cast<size_t>(place)].index;
      const bool is_new = refused_.insert(index).second;
      const size_t count = refused_.size();
      // Warns at counts 1, 2, 4, 8, …
      if (is_new && (count & (count - 1)) == 0) {
        log_warning(concat("nvJPEG refuses sample ", index, ", which libjpeg-turbo decodes (",
                           count, " of this data set so far)"));
      }
    }
  }

  bool is_refused(int64_t index) {
    const std::lock_guard lock(mutex_);
    return refused_.count(index) != 0;
  }

  /// Logs `reason`; the loader's threads decode all later samples.
  void disable(const std::string& reason) {
    disabled_ = true;
    warn_cpu_decodes(JpegDecoder::NvJpeg, reason);
  }

  const ImageDataset& images_;
  std::span<RegionSlot> slots_;
  at::Device device_;
  std::unique_ptr<RegionDecoder> cpu_;
  JpegEngines engines_;                // shared by the slots
  std::vector<EncodedBatch> batches_;  // one per slot
  std::atomic<bool> disabled_{false};
  std::mutex mutex_;
  std::set<int64_t> refused_;  // samples that nvJPEG refused; not tried again in later epochs
};

}  // namespace

std::unique_ptr<RegionDecoder> make_nvjpeg_decoder(const RegionDecoderInputs& inputs,
                                                   std::unique_ptr<RegionDecoder> cpu) {
  if (inputs.images.transform().channels() == 1) {
    warn_cpu_decodes(JpegDecoder::NvJpeg, "data.channels=1 makes images grey on the CPU");
    return cpu;
  }
  const c10::cuda::CUDAGuard guard(inputs.device);
  JpegEngines engines;
  // A high-priority stream: nvJPEG's small kernels would otherwise wait for a step's large ones.
  // Two batches at a time, since one leaves the engines idle between its stages.
  for (int i = 0; i < 2; ++i) {
    std::string reason;
    auto nvjpeg = NvJpeg::open(reason);
    if (!nvjpeg) {
      warn_cpu_decodes(JpegDecoder::NvJpeg, reason);
      return cpu;
    }
    engines.push_back(std::make_unique<JpegEngine>(
        std::move(nvjpeg),
        c10::cuda::getStreamFromPool(/*isHighPriority=*/true, inputs.device.index())));
  }
  return std::make_unique<NvJpegDecoder>(inputs, std::move(cpu), std::move(engines));
}

}  // namespace ddp::detail
