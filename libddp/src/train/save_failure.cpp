// SPDX-License-Identifier: Apache-2.0
#include "train/save_failure.hpp"

#include <mutex>
#include <optional>
#include <utility>

namespace ddp::detail {
namespace {

struct Unsaved {
  std::mutex mutex;
  std::optional<SaveFailure> failure;
};

Unsaved& unsaved() {
  static Unsaved instance;
  return instance;
}

std::optional<SaveFailure> take_unsaved() {
  const std::lock_guard lock(unsaved().mutex);
  return std::exchange(unsaved().failure, std::nullopt);
}

}  // namespace

void note_unsaved(const SaveFailure& failure) {
  const std::lock_guard lock(unsaved().mutex);
  if (!unsaved().failure) {
    unsaved().failure.emplace(failure);
  }
}

void throw_unsaved() {
  if (const auto failure = take_unsaved()) {
    throw SaveFailure(*failure);
  }
}

void forget_unsaved() {
  take_unsaved();
}

}  // namespace ddp::detail
