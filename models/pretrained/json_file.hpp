// SPDX-License-Identifier: Apache-2.0
// Reads a JSON file of settings key by key, with errors that name the file and the key.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace models::detail {

inline constexpr uint64_t kMaxJsonBytes = 16 << 20;

/// Reads a whole file; throws ddp::ReadError naming the file, also if it exceeds `max_bytes`.
std::string read_text_file(const std::string& path, uint64_t max_bytes = kMaxJsonBytes);

/// An object of a JSON file. A key that is null counts as absent, as in Hugging Face's files.
class JsonObject {
 public:
  /// Throws ddp::ReadError if the file is no JSON object or exceeds `max_bytes`.
  explicit JsonObject(const std::string& path, uint64_t max_bytes = kMaxJsonBytes);

  const std::string& path() const { return path_; }
  const nlohmann::json& json() const { return json_; }
  bool has(const std::string& key) const;
  /// True if the key is present, even as null.
  bool mentions(const std::string& key) const { return json_.contains(key); }

  /// Each throws ddp::ReadError if the key has another type, lies outside [min, max], or is absent
  /// without a `fallback`.
  int64_t integer(const std::string& key, int64_t min, int64_t max,
                  std::optional<int64_t> fallback = std::nullopt) const;
  double number(const std::string& key, double min, double max,
                std::optional<double> fallback = std::nullopt) const;
  bool boolean(const std::string& key, bool fallback) const;
  std::string text(const std::string& key,
                   std::optional<std::string> fallback = std::nullopt) const;
  /// Returns the nested object `key`; messages name its keys "key.sub".
  JsonObject object(const std::string& key) const;

  /// Returns `key: value` for messages.
  std::string shown(const std::string& key) const;
  /// Throws ddp::ReadError "FILE: key "KEY" why".
  [[noreturn]] void fail(const std::string& key, const std::string& why) const;
  /// Throws ddp::SettingsError: the file is valid, but its request is not supported.
  [[noreturn]] void refuse(const std::string& key, const std::string& why) const;

 private:
  JsonObject(std::string path, std::string prefix, nlohmann::json json)
      : path_(std::move(path)), prefix_(std::move(prefix)), json_(std::move(json)) {}
  const nlohmann::json* find(const std::string& key, bool required) const;
  std::string where(const std::string& key) const;

  std::string path_;
  std::string prefix_;
  nlohmann::json json_;
};

}  // namespace models::detail
