// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>

#include <array>

#include "ddp/amp/amp_options.hpp"

namespace ddp {

/// Mixed precision for the forward passes in a scope, as torch.autocast: on this thread, for CPU
/// and CUDA tensors. AmpDtype::Off disables autocast inside the scope.
///
/// Nests. The end of the scope (also by an exception) restores the state from its start. The end of
/// the outermost scope clears the cache of cast weights. Run backward() after the scope.
class Autocast {
 public:
  explicit Autocast(const AmpOptions& options);
  explicit Autocast(AmpDtype dtype);
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
  ~Autocast();

 private:
  struct Saved {
    bool enabled;
    at::ScalarType dtype;
  };
  std::array<Saved, 2> saved_;  // CPU, CUDA
  bool saved_cache_enabled_;
};

}  // namespace ddp
