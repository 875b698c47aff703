// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <string>

namespace testing {

/// The message of the E that `function` throws; empty where it throws none. Others pass through.
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
