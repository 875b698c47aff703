// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

namespace examples {

/// A call of an API as a chat model writes it: "<functioncall> {"name": …, "arguments": …}".
struct ApiCall {
  std::string name;       ///< empty where the text after <functioncall> is no JSON object
  std::string canonical;  ///< equal texts mean equal calls: keys in order, no extra white space
};

/// The call in a model's answer; nothing where it makes none. The arguments may be a JSON object, a
/// text that holds one, or (as the Glaive data write it) such a text in single quotes. What is no
/// JSON is compared as text, white space apart.
std::optional<ApiCall> find_api_call(const std::string& answer);

}  // namespace examples
