// SPDX-License-Identifier: Apache-2.0
#include "common/api_call.hpp"

#include <nlohmann/json.hpp>
#include <sstream>

namespace examples {
namespace {

using Json = nlohmann::json;  // sorts an object's keys

constexpr const char* kMark = "<functioncall>";

std::string single_spaced(const std::string& text) {
  std::istringstream words(text);
  std::string result;
  for (std::string word; words >> word;) {
    result += (result.empty() ? "" : " ") + word;
  }
  return result;
}

/// Removes the single quotes around an object: 'arguments': '{"a": 1}' is not JSON.
std::string without_single_quotes(const std::string& text) {
  const auto begin = text.find("'{");
  const auto end = text.rfind("}'");
  if (begin == std::string::npos || end == std::string::npos || end < begin) {
    return text;
  }
  return text.substr(0, begin) + text.substr(begin + 1, end - begin) + text.substr(end + 2);
}

std::optional<Json> parse_object(const std::string& text) {
  auto json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  return json.is_object() ? std::optional(std::move(json)) : std::nullopt;
}

}  // namespace

std::optional<ApiCall> find_api_call(const std::string& answer) {
  const auto mark = answer.find(kMark);
  if (mark == std::string::npos) {
    return std::nullopt;
  }
  const auto text = single_spaced(answer.substr(mark + std::string(kMark).size()));
  auto call = parse_object(text);
  if (!call) {
    call = parse_object(without_single_quotes(text));
  }
  if (!call) {
    return ApiCall{.name = "", .canonical = text};
  }
  if (auto arguments = call->find("arguments");
      arguments != call->end() && arguments->is_string()) {
    if (const auto inner = parse_object(arguments->get<std::string>())) {
      *arguments = *inner;
    }
  }
  const auto name = call->find("name");
  return ApiCall{.name = name != call->end() && name->is_string() ? name->get<std::string>() : "",
                 .canonical = call->dump(-1, ' ', false, Json::error_handler_t::replace)};
}

}  // namespace examples
