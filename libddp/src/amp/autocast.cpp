// SPDX-License-Identifier: Apache-2.0
#include "ddp/amp/amp.hpp"

#include <ATen/autocast_mode.h>

#include <array>

namespace ddp {
namespace {

constexpr std::array kDeviceTypes = {at::kCPU, at::kCUDA};

}  // namespace

void describe_fields(AmpOptions& o, FieldVisitor& v) {
  v.field({.name = "dtype", .doc = "Dtype in which autocast computes.", .common = true}, o.dtype,
          {{"off", AmpDtype::Off}, {"bf16", AmpDtype::Bf16}, {"fp16", AmpDtype::Fp16}});
  v.field({.name = "grad_scaling", .doc = "Scale the loss. auto: with fp16 only."}, o.grad_scaling,
          {{"auto", GradScaling::Auto}, {"on", GradScaling::On}, {"off", GradScaling::Off}});
  v.field({.name = "init_scale", .doc = "Initial loss scale; more than 0.", .min = 0.0},
          o.init_scale);
  v.field(
      {.name = "growth_factor", .doc = "Factor by which the scale grows; more than 1.", .min = 1.0},
      o.growth_factor);
  v.field({.name = "backoff_factor",
           .doc = "Factor of the scale after inf or NaN; more than 0 and less than 1.",
           .min = 0.0,
           .max = 1.0},
          o.backoff_factor);
  v.field({.name = "growth_interval",
           .doc = "Steps without inf or NaN until the scale grows.",
           .unit = "steps",
           .min = 1},
          o.growth_interval);
}

Autocast::Autocast(const AmpOptions& options) : Autocast(options.dtype) {
  options.usage.set();
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
