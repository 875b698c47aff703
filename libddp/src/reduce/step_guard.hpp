// SPDX-License-Identifier: Apache-2.0
// Asks the models of a thread, before an optimizer's step, whether the gradients are means.
#pragma once

#include <functional>
#include <memory>

#include "ddp/core/state_dict.hpp"

namespace ddp::detail {

/// A model's part: registers itself with the thread that makes it.
class StepGuard {
 public:
  /// `check` throws if an update of these parameters would use gradients that no backward averaged.
  using Check = std::function<void(const NamedParameters&)>;
  explicit StepGuard(Check check);
  ~StepGuard();
  StepGuard(const StepGuard&) = delete;
  StepGuard& operator=(const StepGuard&) = delete;

  /// The optimizer's part: calls the checks of all models that this thread made.
  static void check_all(const NamedParameters& updated);

 private:
  struct Registry;
  static std::shared_ptr<Registry> registry_of_thread();

  Check check_;
  std::shared_ptr<Registry> registry_;
};

}  // namespace ddp::detail
