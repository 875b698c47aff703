// SPDX-License-Identifier: Apache-2.0
#include "ddp/amp/amp_options.hpp"

namespace ddp {

void describe_fields(AmpOptions& o, FieldVisitor& v) {
  v.field({.name = "dtype", .doc = "what autocast computes in"}, o.dtype,
          {{"off", AmpDtype::Off}, {"bf16", AmpDtype::Bf16}, {"fp16", AmpDtype::Fp16}});
  v.field({.name = "grad_scaling", .doc = "scale the loss; auto: with fp16 only"}, o.grad_scaling,
          {{"auto", GradScaling::Auto}, {"on", GradScaling::On}, {"off", GradScaling::Off}});
  v.field({.name = "init_scale", .doc = "first loss scale", .min = 0.0}, o.init_scale);
  v.field({.name = "growth_factor", .doc = "factor of the scale when it grows", .min = 1.0},
          o.growth_factor);
  v.field({.name = "backoff_factor",
           .doc = "factor of the scale after inf or NaN",
           .min = 0.0,
           .max = 1.0},
          o.backoff_factor);
  v.field({.name = "growth_interval",
           .doc = "steps without inf or NaN until the scale grows",
           .unit = "steps",
           .min = 1},
          o.growth_interval);
}

}  // namespace ddp
