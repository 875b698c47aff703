// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ddp/core/fields.hpp"
#include "ddp/core/taken_mark.hpp"

namespace ddp {

enum class AmpDtype { Off, Bf16, Fp16 };

enum class GradScaling {
  Auto,  ///< on with fp16 only; bfloat16 has float32's range
  On,
  Off
};

/// Settings of Autocast and GradScaler; the numbers are PyTorch's defaults.
struct AmpOptions {
  AmpDtype dtype = AmpDtype::Off;                ///< autocast's compute dtype
  GradScaling grad_scaling = GradScaling::Auto;  ///< whether GradScaler is enabled
  double init_scale = 65536.0;
  double growth_factor = 2.0;      ///< > 1
  double backoff_factor = 0.5;     ///< < 1
  int64_t growth_interval = 2000;  ///< steps without inf or NaN until the scale grows
  detail::TakenMark taken{};  ///< not a setting: reports to ddp::Config that these options are used
};
void describe_fields(AmpOptions& options, FieldVisitor& visitor);

}  // namespace ddp
