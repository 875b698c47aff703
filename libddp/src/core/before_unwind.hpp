// SPDX-License-Identifier: Apache-2.0
// Hearing of an exception before it unwinds the stack.
#pragma once

#include <exception>
#include <functional>

namespace ddp::detail {

/// Runs `body`. If an exception leaves it, `observe` sees the exception first, while all objects of
/// the frames below are still alive, and then the exception goes on to the caller. Destructors may
/// wait for the device or for other ranks; a cause that is told only after them may never be told.
///
/// `observe` gets nullptr for what is no std::exception; what it throws is dropped. With another
/// C++ runtime library than GNU's it runs after the unwinding of `body`.
void observe_before_unwind(const std::function<void()>& body,
                           const std::function<void(const std::exception*)>& observe);

/// Called by the filter below. Each exception of a body is shown once.
bool show_to_observer(const std::exception* exception) noexcept;

#ifdef __GLIBCXX__
/// Nothing of this type is ever thrown. Its type information (before_unwind_filter.cpp) is our own:
/// the search for a handler, which precedes all unwinding, asks it whether it matches, and it shows
/// the exception to the observer and says no.
class UnwindFilter {
 public:
  virtual ~UnwindFilter();  // never defined: so this file's users refer to our type information
};
#endif

}  // namespace ddp::detail
