// SPDX-License-Identifier: Apache-2.0
#include "data/images/region_decoder.hpp"

#include <ATen/ops/empty.h>

#include <iterator>
#include <mutex>

#include "data/images/cpu_decoder.hpp"
#include "data/images/nvjpeg/nvjpeg_decoder.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {

namespace {

struct DecoderRow {
  const char* name;        // the value of loader.jpeg_decoder
  MakeRegionDecoder make;  // nullptr: the CPU decodes
};

// One row per decoder. The enumerators of JpegDecoder count the rows.
constexpr DecoderRow kDecoders[] = {
    {"cpu", nullptr},
    {"nvjpeg", make_nvjpeg_decoder},
};

const DecoderRow& row_of(JpegDecoder decoder) {
  return kDecoders[static_cast<size_t>(decoder)];
}

}  // namespace

void RegionSlot::reserve(int64_t header_bytes, int64_t pixel_bytes, bool pinned) {
  header_bytes_ = aligned(header_bytes);
  block_ = at::empty({header_bytes_ + aligned(pixel_bytes)},
                     at::TensorOptions().dtype(at::kByte).pinned_memory(pinned));
  memory_ = block_.mutable_data_ptr<uint8_t>();
}

void RegionSlot::reset(int64_t num_samples) {
  used_ = header_bytes_;
  samples_.clear();
  samples_.resize(static_cast<size_t>(num_samples));
}

uint8_t* RegionSlot::allocate(int64_t place, int64_t num_bytes) {
  DecodedRegion& region = sample(place);
  region.on_device = nullptr;
  int64_t offset = used_.load();
  do {
    if (offset + num_bytes > block_.numel()) {
      region.offset = -1;
      region.overflow.resize(static_cast<size_t>(num_bytes));
      return region.overflow.data();
    }
  } while (!used_.compare_exchange_weak(offset, offset + aligned(num_bytes)));
  region.offset = offset;
  return memory_ + offset;
}

std::unique_ptr<RegionDecoder> make_region_decoder(JpegDecoder chosen,
                                                   const RegionDecoderInputs& inputs) {
  auto cpu = make_cpu_decoder(inputs);
  const MakeRegionDecoder make = row_of(chosen).make;
  return make != nullptr ? make(inputs, std::move(cpu)) : std::move(cpu);
}

std::vector<std::pair<std::string, JpegDecoder>> jpeg_decoder_names() {
  std::vector<std::pair<std::string, JpegDecoder>> names;
  for (size_t i = 0; i < std::size(kDecoders); ++i) {
    names.emplace_back(kDecoders[i].name, static_cast<JpegDecoder>(i));
  }
  return names;
}

void warn_cpu_decodes(JpegDecoder chosen, const std::string& reason) {
  static std::once_flag logged;
  std::call_once(logged, [&] {
    log_warning(concat("loader.jpeg_decoder=", row_of(chosen).name, " is not used: ", reason,
                       "; the loader's threads decode with libjpeg-turbo"));
  });
}

}  // namespace ddp::detail
