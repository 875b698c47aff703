// SPDX-License-Identifier: Apache-2.0
// Parameters of several wrapped models: a backward of one of them adds to .grad of all.
#pragma once

namespace ddp::detail {

class GradientArena;

/// Whether several wrapped models own the parameter.
bool is_shared(const GradientArena& gradients, int parameter);
/// Whether they own any.
bool any_is_shared(const GradientArena& gradients);
/// Call for a gradient that is not reduced. Marks the mean to which it was added if the parameter
/// is shared, because another model cannot tell a mean from a local gradient.
void record_local_gradient(const GradientArena& gradients, int parameter);
/// Whether .grad of a shared parameter holds a local gradient, which waits for a mean.
bool shared_gradient_waits(const GradientArena& gradients);

}  // namespace ddp::detail
