// SPDX-License-Identifier: Apache-2.0
#include "pretrained/json_file.hpp"

#include "ddp/core/error.hpp"
#include "ddp/detail/file_content.hpp"
#include "pretrained/positioned_file.hpp"

namespace models::detail {
namespace {

using Json = nlohmann::json;
using ddp::concat;

constexpr int kMaxDepth = 32;

// Shortens the value: a hostile file may hold long ones.
std::string brief(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return text.size() <= 100 ? text : text.substr(0, 100) + "…";
}

}  // namespace

std::string read_text_file(const std::string& path, uint64_t max_bytes) {
  const PositionedFile file(path);
  if (file.size() > max_bytes) {
    throw ddp::ReadError(
        concat(path, " is larger than ", max_bytes >> 20, " MiB, which no file of this kind is"));
  }
  std::string text(file.size(), '\0');
  file.read(0, text.data(), text.size());
  return text;
}

JsonObject::JsonObject(const std::string& path, uint64_t max_bytes) : path_(path) {
  const std::string text = read_text_file(path, max_bytes);
  try {
    json_ = Json::parse(text, [&](int depth, Json::parse_event_t, Json&) {
      if (depth > kMaxDepth) {  // a message that prints the value would recurse as deep
        throw ddp::ReadError(concat(path, " nests deeper than ", kMaxDepth, " levels"));
      }
      return true;
    });
  } catch (const Json::parse_error& error) {
    throw ddp::ReadError(concat(path, " is not JSON: broken at byte ", error.byte,
                                text.starts_with('{') ? "" : ddp::content_note(text)));
  } catch (const Json::exception& error) {  // a number outside the range of double
    throw ddp::ReadError(concat(path, " is not JSON: ", error.what()));
  }
  if (!json_.is_object()) {
    throw ddp::ReadError(path + " is not a JSON object but of type " + json_.type_name());
  }
}

bool JsonObject::has(const std::string& key) const {
  const auto found = json_.find(key);
  return found != json_.end() && !found->is_null();
}

std::string JsonObject::where(const std::string& key) const {
  return path_ + ": key \"" + prefix_ + key + "\" ";
}

std::string JsonObject::shown(const std::string& key) const {
  return "is " + (mentions(key) ? brief(json_.at(key)) : std::string("absent"));
}

void JsonObject::fail(const std::string& key, const std::string& why) const {
  throw ddp::ReadError(where(key) + why);
}

void JsonObject::refuse(const std::string& key, const std::string& why) const {
  throw ddp::SettingsError(where(key) + why);
}

const Json* JsonObject::find(const std::string& key, bool required) const {
  if (has(key)) {
    return &json_.at(key);
  }
  if (required) {
    fail(key, mentions(key) ? "is null but required" : "is missing");
  }
  return nullptr;
}

int64_t JsonObject::integer(const std::string& key, int64_t min, int64_t max,
                            std::optional<int64_t> fallback) const {
  const Json* value = find(key, !fallback);
  if (value == nullptr) {
    return *fallback;
  }
  if (!value->is_number_integer()) {
    fail(key, shown(key) + ", expected an integer");
  }
  // A number beyond int64 is kept unsigned and would turn negative in the cast.
  const bool too_large =
      value->is_number_unsigned() && value->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX);
  const auto number = value->get<int64_t>();
  if (too_large || number < min || number > max) {
    fail(key, concat(shown(key), ", expected ", min, " to ", max));
  }
  return number;
}

double JsonObject::number(const std::string& key, double min, double max,
                          std::optional<double> fallback) const {
  const Json* value = find(key, !fallback);
  if (value == nullptr) {
    return *fallback;
  }
  if (!value->is_number()) {
    fail(key, shown(key) + ", expected a number");
  }
  const auto number = value->get<double>();
  if (!(number >= min && number <= max)) {
    fail(key, concat(shown(key), ", expected ", min, " to ", max));
  }
  return number;
}

bool JsonObject::boolean(const std::string& key, bool fallback) const {
  const Json* value = find(key, false);
  if (value == nullptr) {
    return fallback;
  }
  if (!value->is_boolean()) {
    fail(key, shown(key) + ", expected true or false");
  }
  return value->get<bool>();
}

std::string JsonObject::text(const std::string& key, std::optional<std::string> fallback) const {
  const Json* value = find(key, !fallback);
  if (value == nullptr) {
    return *fallback;
  }
  if (!value->is_string()) {
    fail(key, shown(key) + ", expected a string");
  }
  return value->get<std::string>();
}

JsonObject JsonObject::object(const std::string& key) const {
  const Json* value = find(key, true);
  if (!value->is_object()) {
    fail(key, shown(key) + ", expected an object");
  }
  return {path_, prefix_ + key + ".", *value};
}

}  // namespace models::detail
