// SPDX-License-Identifier: Apache-2.0
#include "ddp/amp/amp.hpp"

namespace ddp {

void describe_fields(AmpOptions& o, FieldVisitor& v) {
  v.field({.name = "dtype", .doc = "Dtype in which autocast computes."}, o.dtype,
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

}  // namespace ddp
