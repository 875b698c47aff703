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

struct Autocast::Saved {
  struct Device {
    bool enabled = false;
    at::ScalarType dtype = at::kFloat;
  };
  std::array<Device, kDeviceTypes.size()> devices;
  bool cache_enabled = false;
};

Autocast::Autocast(AmpDtype dtype) {
  Saved saved{.devices = {}, .cache_enabled = at::autocast::is_autocast_cache_enabled()};
  for (size_t i = 0; i < kDeviceTypes.size(); ++i) {
    saved.devices[i] = {at::autocast::is_autocast_enabled(kDeviceTypes[i]),
                        at::autocast::get_autocast_dtype(kDeviceTypes[i])};
  }
  saved_ = std::make_unique<const Saved>(saved);
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
    at::autocast::set_autocast_enabled(kDeviceTypes[i], saved_->devices[i].enabled);
    at::autocast::set_autocast_dtype(kDeviceTypes[i], saved_->devices[i].dtype);
  }
  at::autocast::set_autocast_cache_enabled(saved_->cache_enabled);
}

}  // namespace ddp
