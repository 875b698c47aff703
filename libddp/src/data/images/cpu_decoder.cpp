// SPDX-License-Identifier: Apache-2.0
#include "data/images/cpu_decoder.hpp"

#include "data/sources/image_dataset.hpp"

namespace ddp::detail {

namespace {

class CpuDecoder final : public RegionDecoder {
 public:
  explicit CpuDecoder(const RegionDecoderInputs& inputs)
      : images_(inputs.images), slots_(inputs.slots) {}

  void resize(int slot, int64_t num_samples) override {
    slots_[static_cast<size_t>(slot)].reset(num_samples);
  }

  void fill(int slot, int64_t place, int64_t index, int64_t epoch) override {
    RegionSlot& s = slots_[static_cast<size_t>(slot)];
    DecodedRegion& region = s.sample(place);
    region.target = images_.read_region(index, epoch, region.plan, [&](const RegionPlan& plan) {
      return s.allocate(place, int64_t{plan.region.width} * plan.region.height * 3);
    });
  }

  void finish(int) override {}

 private:
  const ImageDataset& images_;
  std::span<RegionSlot> slots_;
};

}  // namespace

std::unique_ptr<RegionDecoder> make_cpu_decoder(const RegionDecoderInputs& inputs) {
  return std::make_unique<CpuDecoder>(inputs);
}

}  // namespace ddp::detail
