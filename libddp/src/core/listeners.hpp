// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace ddp::detail {

/// Functions that are called when something happens. Not thread safe.
class Listeners {
 public:
  /// The listener is called as long as its token lives. Tokens and Listeners may be destroyed in
  /// any order.
  using Token = std::shared_ptr<const std::function<void()>>;

  [[nodiscard]] Token add(std::function<void()> listener) {
    auto token = std::make_shared<const std::function<void()>>(std::move(listener));
    listeners_.push_back(token);
    return token;
  }

  /// Calls the listeners in the order in which they were added.
  void notify() {
    std::erase_if(listeners_, [](const auto& listener) { return listener.expired(); });
    const auto listeners = listeners_;  // a listener may add or end others
    for (const auto& weak : listeners) {
      if (const auto listener = weak.lock()) {
        (*listener)();
      }
    }
  }

 private:
  std::vector<std::weak_ptr<const std::function<void()>>> listeners_;
};

}  // namespace ddp::detail
