// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "ddp/core/error.hpp"

namespace ddp::detail {

/// A dense gradient itself, or the values of a sparse one, whose other elements are 0. Throws
/// SettingsError if several of a sparse one's values belong to one element, because their sum is
/// the gradient. `caller` and `name` are for the message.
inline at::Tensor stored_values(const at::Tensor& gradient, const char* caller,
                                const std::string& name) {
  if (gradient.layout() == at::kStrided) {
    return gradient;
  }
  if (gradient.layout() != at::kSparse || !gradient.is_coalesced()) {
    throw SettingsError(concat(caller, ": the gradient of ", name, " is of layout ",
                               gradient.layout(),
                               " and not coalesced; fix: use it after a synchronised backward of a "
                               "model with ddp.sparse=gather, or assign gradient.coalesce()"));
  }
  return gradient._values();
}

}  // namespace ddp::detail
