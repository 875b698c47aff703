// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <string>

namespace testing {

/// Returns the message of the E that `function` throws, or "" if it throws none. Other exceptions
/// pass through.
template <typename E = std::exception, typename F>
std::string message_of(F&& function) {
  try {
    function();
  } catch (const E& error) {
    return error.what();
  }
  return {};
}

}  // namespace testing
