// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint/manifest.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/control/wire/bounded_json.hpp"

namespace ddp::detail {
namespace {

using OrderedJson = nlohmann::ordered_json;

// The end of every manifest: 16 digits between these two strings.
constexpr std::string_view kChecksumKey = ",\n\"manifest_xxh3\": \"";
constexpr std::string_view kChecksumEnd = "\"\n}\n";
constexpr std::size_t kTailBytes = kChecksumKey.size() + 16 + kChecksumEnd.size();
constexpr std::size_t kMaxManifestBytes = 16u << 20;
constexpr int kMaxDepth = 8;

std::string to_hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

uint64_t from_hex(const std::string& text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (text.size() != 16 || error != std::errc() || end != text.data() + text.size()) {
    throw ReadError("'" + text.substr(0, 32) + "' is not a checksum");
  }
  return value;
}

// JSON has no infinities; the shortest decimal of a finite double parses to the same bits.
OrderedJson value_to_json(const ManifestValue& value) {
  if (const auto* number = std::get_if<double>(&value); number && !std::isfinite(*number)) {
    return {{"double", std::isnan(*number) ? "nan" : *number > 0 ? "inf" : "-inf"}};
  }
  return std::visit([](const auto& held) { return OrderedJson(held); }, value);
}

ManifestValue value_from_json(const OrderedJson& json) {
  if (json.is_boolean()) {
    return json.get<bool>();
  }
  if (fits_int64(json)) {
    return json.get<int64_t>();
  }
  if (json.is_number_float()) {
    return json.get<double>();
  }
  if (json.is_object()) {
    const auto& word = json.at("double").get_ref<const std::string&>();
    return word == "nan" ? NAN : word == "inf" ? INFINITY : -INFINITY;
  }
  return json.get<std::string>();
}

OrderedJson files_to_json(const std::vector<FileRecord>& files) {
  OrderedJson list = OrderedJson::array();
  for (const auto& file : files) {
    list.push_back({{"name", file.name}, {"size", file.size}, {"xxh3", to_hex(file.xxh3)}});
    if (file.has_parts) {
      list.back()["has_parts"] = true;
    }
  }
  return list;
}

int64_t whole_number(const OrderedJson& json, const char* key, int64_t at_least) {
  const auto& value = json.at(key);
  if (!fits_int64(value) || value.get<int64_t>() < at_least) {
    throw ReadError(concat("\"", key, "\" is ", value.dump().substr(0, 40),
                           ", not a whole number of at least ", at_least));
  }
  return value.get<int64_t>();
}

// A manifest must not reach outside its folder.
void check_name(const std::string& name) {
  if (name.empty() || name.size() > 255 || name == "." || name == ".." ||
      name.find('/') != std::string::npos || name.find('\0') != std::string::npos) {
    throw ReadError("it lists the invalid file name '" + name.substr(0, 300) + "'");
  }
}

std::vector<FileRecord> files_from_json(const OrderedJson& list) {
  std::vector<FileRecord> files;
  for (const auto& item : list) {
    FileRecord file{.name = item.at("name").get<std::string>(),
                    .size = static_cast<uint64_t>(whole_number(item, "size", 0)),
                    .xxh3 = from_hex(item.at("xxh3").get<std::string>()),
                    .has_parts = item.contains("has_parts") && item.at("has_parts").get<bool>()};
    check_name(file.name);
    files.push_back(std::move(file));
  }
  return files;
}

void check_checksum(std::string_view text) {
  if (text.size() < kTailBytes || text.size() > kMaxManifestBytes) {
    throw ReadError(concat("it has ", text.size(), " bytes; a manifest has ", kTailBytes, " to ",
                           kMaxManifestBytes));
  }
  const auto body = text.substr(0, text.size() - kTailBytes);
  const auto expected = concat(kChecksumKey, to_hex(xxh3(body)), kChecksumEnd);
  if (text.substr(body.size()) != expected) {
    throw ReadError("its checksum does not match: it is truncated or damaged");
  }
}

// Format 1 has the parameters of kDefaultPair only, without its name.
std::map<std::string, std::map<std::string, std::string>> leaf_dtypes_from_json(
    const OrderedJson& json) {
  std::map<std::string, std::map<std::string, std::string>> by_pair;
  if (json.contains("leaf_dtypes_by_pair")) {
    json.at("leaf_dtypes_by_pair").get_to(by_pair);
  }
  if (const auto& of_default = json.at("leaf_dtypes"); !of_default.empty()) {
    of_default.get_to(by_pair[kDefaultPair]);
  }
  return by_pair;
}

Manifest manifest_from_json(const OrderedJson& json) {
  Manifest manifest;
  manifest.format = whole_number(json, "format", 1);
  if (manifest.format > kCheckpointFormat) {
    throw NewerFormatError(concat("it has format ", manifest.format,
                                  ", but this program reads formats up to ", kCheckpointFormat,
                                  "; fix: use a newer libddp"));
  }
  manifest.step = whole_number(json, "step", 0);
  manifest.world_size = whole_number(json, "world_size", 1);
  if (json.contains("samples_per_step")) {
    manifest.samples_per_step = whole_number(json, "samples_per_step", 1);
  }
  if (json.contains("metric")) {
    manifest.metric = std::get<double>(value_from_json(json.at("metric")));
  }
  if (json.contains("keep_best")) {
    json.at("keep_best").get_to(manifest.keep_best);
    if (manifest.keep_best != "min" && manifest.keep_best != "max") {
      throw ReadError("its keep_best is neither min nor max");
    }
  }
  manifest.finite_is_known = json.contains("finite");
  manifest.finite = !manifest.finite_is_known || json.at("finite").get<bool>();
  manifest.files = files_from_json(json.at("files"));
  for (const auto& [object, values] : json.at("values").items()) {
    auto& target = manifest.values[object];
    for (const auto& [key, value] : values.items()) {
      target[key] = value_from_json(value);
    }
  }
  manifest.leaf_dtypes = leaf_dtypes_from_json(json);
  manifest.texts = json.at("texts").get<std::map<std::string, std::string>>();
  return manifest;
}

}  // namespace

std::string manifest_to_json(const Manifest& manifest) {
  const bool has_parts = std::any_of(manifest.files.begin(), manifest.files.end(),
                                     [](const FileRecord& file) { return file.has_parts; });
  OrderedJson json = {{"format", std::max<int64_t>(manifest.format, has_parts ? 3 : 1)},
                      {"step", manifest.step},
                      {"world_size", manifest.world_size}};
  if (manifest.samples_per_step > 0) {
    json["samples_per_step"] = manifest.samples_per_step;
  }
  if (manifest.metric) {
    json["metric"] = value_to_json(*manifest.metric);
  }
  if (!manifest.keep_best.empty()) {
    json["keep_best"] = manifest.keep_best;
  }
  json["finite"] = manifest.finite;
  json["files"] = files_to_json(manifest.files);
  json["values"] = OrderedJson::object();
  for (const auto& [object, values] : manifest.values) {
    json["values"][object] = OrderedJson::object();
    for (const auto& [key, value] : values) {
      json["values"][object][key] = value_to_json(value);
    }
  }
  json["leaf_dtypes"] = OrderedJson::object();  // earlier versions require it
  json["texts"] = manifest.texts;
  // A user's text may contain any bytes; a save must not fail for them.
  std::string body = json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace);
  body.resize(body.size() - 2);  // "\n}"
  if (body.size() + kTailBytes > kMaxManifestBytes) {
    const auto longest = std::max_element(
        manifest.texts.begin(), manifest.texts.end(),
        [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
    throw WriteError(concat(
        "the manifest would have ", body.size() + kTailBytes, " bytes, it may have at most ",
        kMaxManifestBytes,
        longest == manifest.texts.end()
            ? ""
            : concat("; fix: shorten the text '", longest->first,
                     "' (Checkpointer::set_text), which has ", longest->second.size(), " bytes")));
  }
  return concat(body, kChecksumKey, to_hex(xxh3(body)), kChecksumEnd);
}

Manifest parse_manifest(std::string_view text, const std::string& path) {
  std::string reason;
  try {
    check_checksum(text);
    return manifest_from_json(parse_bounded_json<OrderedJson>(text, kMaxDepth));
  } catch (const NewerFormatError& error) {
    throw NewerFormatError(path + " cannot be read: " + error.what());
  } catch (const ReadError& error) {
    reason = error.what();
  } catch (const nlohmann::json::exception& error) {
    reason = error.what();
  } catch (const std::bad_variant_access&) {
    reason = "its metric is not a number";
  }
  throw ReadError(path + " is not a valid manifest: " + reason);
}

}  // namespace ddp::detail
