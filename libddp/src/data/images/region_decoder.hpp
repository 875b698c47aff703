// SPDX-License-Identifier: Apache-2.0
// Decoders of the images that a GPU crops and resizes, and the memory that they decode to:
//
//   RegionBuilder   owns the slots, and turns a finished slot into a batch on the GPU
//   RegionDecoder   fills the slots. CpuDecoder decodes on the loader's threads. Another decoder
//                   gives it each sample that it does not decode itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "data/images/image_transform.hpp"
#include "ddp/data/options.hpp"
#include "ddp/detail/prefetch_source.hpp"

namespace ddp::detail {

class ImageDataset;

/// The decoded part of one sample's image. Its pixels [plan.region.height, plan.region.width, 3]
/// lie in one of three places.
struct DecodedRegion {
  RegionPlan plan;
  int64_t target = 0;
  int64_t offset = -1;                 ///< in bytes, in the slot's block; -1: in another place
  std::vector<uint8_t> overflow;       ///< used if the block has no room
  const uint8_t* on_device = nullptr;  ///< a decoder's memory, until the slot's next resize()
};

/// The decoded samples of one batch in host memory: one block, and the overflow of single samples.
class RegionSlot {
 public:
  /// Allocates the block: `header_bytes` for the slot's owner, then `pixel_bytes`.
  void reserve(int64_t header_bytes, int64_t pixel_bytes, bool pinned);
  /// Starts a batch.
  void reset(int64_t num_samples);
  /// Memory for a sample's pixels, instead of those that it has. Callable from several threads for
  /// different places.
  uint8_t* allocate(int64_t place, int64_t num_bytes);

  DecodedRegion& sample(int64_t place) { return samples_[static_cast<size_t>(place)]; }
  std::span<DecodedRegion> samples() { return samples_; }
  const at::Tensor& block() const { return block_; }
  int64_t used_bytes() const { return used_.load(); }  ///< of the block

 private:
  at::Tensor block_;
  uint8_t* memory_ = nullptr;
  int64_t header_bytes_ = 0;
  std::atomic<int64_t> used_{0};
  std::vector<DecodedRegion> samples_;
};

/// `num_bytes`, rounded up to a multiple of `alignment`.
inline int64_t aligned(int64_t num_bytes, int64_t alignment = 16) {
  return (num_bytes + alignment - 1) / alignment * alignment;
}

/// Decodes the samples of a data set to the slots that it was made for. SlotFiller has the order
/// and the threads of the calls. After finish(), each sample has a plan, a target and pixels, and
/// no device still writes them.
using RegionDecoder = SlotFiller;

/// The data set and the slots outlive the decoder.
struct RegionDecoderInputs {
  const ImageDataset& images;
  std::span<RegionSlot> slots;
  at::Device device;  ///< a CUDA device
};

/// Makes a decoder that gives to `cpu` what it does not decode. Returns `cpu` itself, after
/// warn_cpu_decodes(), if it can decode nothing here.
using MakeRegionDecoder = std::unique_ptr<RegionDecoder> (*)(const RegionDecoderInputs& inputs,
                                                             std::unique_ptr<RegionDecoder> cpu);

/// The decoder of loader.jpeg_decoder.
std::unique_ptr<RegionDecoder> make_region_decoder(JpegDecoder chosen,
                                                   const RegionDecoderInputs& inputs);

/// The values of loader.jpeg_decoder.
std::vector<std::pair<std::string, JpegDecoder>> jpeg_decoder_names();

/// Logs once per process why the CPU decodes although another decoder was `chosen`.
void warn_cpu_decodes(JpegDecoder chosen, const std::string& reason);

}  // namespace ddp::detail
