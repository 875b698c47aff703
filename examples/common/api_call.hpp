// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

namespace examples {

/// A call of an API as a chat model writes it: "<functioncall> {"name": …, "arguments": …}".
struct ApiCall {
  std::string name;       ///< empty if the text after <functioncall> is no JSON object
  std::string canonical;  ///< equal texts mean equal calls: sorted keys, no extra white space
};

/// Returns the call in a model's answer, or nullopt if there is none. The arguments may be a JSON
/// object, a string that holds one, or (as in the Glaive data) such a string in single quotes. Text
/// that is not JSON is compared without its white space.
std::optional<ApiCall> find_api_call(const std::string& answer);

}  // namespace examples
