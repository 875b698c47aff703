// SPDX-License-Identifier: Apache-2.0
#include "core/before_unwind.hpp"

namespace ddp::detail {
namespace {

struct Observer {
  const std::function<void(const std::exception*)>* observe = nullptr;
  bool has_seen = false;
};

thread_local Observer* current_observer = nullptr;

class ObserverScope {
 public:
  explicit ObserverScope(Observer* observer) : previous_(current_observer) {
    current_observer = observer;
  }
  ~ObserverScope() { current_observer = previous_; }
  ObserverScope(const ObserverScope&) = delete;
  ObserverScope& operator=(const ObserverScope&) = delete;

 private:
  Observer* previous_;
};

const std::exception* current_std_exception() {
  try {
    throw;
  } catch (const std::exception& exception) {
    return &exception;
  } catch (...) {
    return nullptr;
  }
}

}  // namespace

bool show_to_observer(const std::exception* exception) noexcept {
  Observer* observer = current_observer;
  if (observer == nullptr || observer->has_seen) {
    return false;
  }
  observer->has_seen = true;
  try {
    (*observer->observe)(exception);
  } catch (...) {
    // The first exception is what matters.
  }
  return true;
}

void observe_before_unwind(const std::function<void()>& body,
                           const std::function<void(const std::exception*)>& observe) {
  Observer observer{&observe};
  const ObserverScope scope(&observer);
  try {
    body();
#ifdef __GLIBCXX__
  } catch (UnwindFilter&) {
#endif
  } catch (...) {
    show_to_observer(current_std_exception());  // only where the filter did not
    throw;
  }
}

}  // namespace ddp::detail
