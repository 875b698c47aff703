// SPDX-License-Identifier: Apache-2.0
#include "ddp/amp/amp.hpp"

#include <ATen/autocast_mode.h>

#include <array>

namespace ddp {
namespace {

constexpr std::array kDeviceTypes = {at::kCPU, at::kCUDA};

}  // namespace

Autocast::Autocast(const AmpOptions& options) : Autocast(options.dtype) {
  options.taken.set();
}

Autocast::Autocast(AmpDtype dtype)
    : saved_cache_enabled_(at::autocast::is_autocast_cache_enabled()) {
  for (size_t i = 0; i < kDeviceTypes.size(); ++i) {
    const at::DeviceType device_type = kDeviceTypes[i];
    saved_[i] = {at::autocast::is_autocast_enabled(device_type),
                 at::autocast::get_autocast_dtype(device_type)};
  }
  for (const at::DeviceType device_type : kDeviceTypes) {
    at::autocast::set_autocast_enabled(device_type, dtype != AmpDtype::Off);
    if (dtype != AmpDtype::Off) {
      at::autocast::set_autocast_dtype(device_type,
                                       dtype == AmpDtype::Bf16 ? at::kBFloat16 : at::kHalf);
    }
  }
  at::autocast::set_autocast_cache_enabled(true);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  // The cache holds casts of weights that the optimizer will change.
  if (at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache();
  }
  for (size_t i = 0; i < kDeviceTypes.size(); ++i) {
    at::autocast::set_autocast_enabled(kDeviceTypes[i], saved_[i].enabled);
    at::autocast::set_autocast_dtype(kDeviceTypes[i], saved_[i].dtype);
  }
  at::autocast::set_autocast_cache_enabled(saved_cache_enabled_);
}

}  // namespace ddp
