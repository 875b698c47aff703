// SPDX-License-Identifier: Apache-2.0
// What a checkpoint's manifest.json says. Torch-free.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/file_ops.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

/// Raised when a reader meets a checkpoint with a greater number than it knows.
inline constexpr int64_t kCheckpointFormat = 1;
inline constexpr const char* kManifestName = "manifest.json";

/// The same type as ddp::StateValue, whose header needs LibTorch.
using ManifestValue = std::variant<bool, int64_t, double, std::string>;

struct Manifest {
  int64_t format = kCheckpointFormat;
  int64_t step = 0;  ///< steps done
  int64_t world_size = 1;
  std::optional<double> metric = {};
  bool finite = true;           ///< no inf or NaN in it; of an older program's, true
  bool finite_is_known = true;  ///< false: an older program's, which did not look
  std::vector<FileRecord> files = {};
  std::map<std::string, std::map<std::string, ManifestValue>> values = {};  ///< by object, by key
  std::map<std::string, std::string> leaf_dtypes = {};  ///< of parameters saved as their master
  std::map<std::string, std::string> texts = {};        ///< "settings", "plan", …

  bool operator==(const Manifest&) const = default;
};

/// A newer program wrote this; falling back to an older checkpoint would lose its work silently.
struct NewerFormatError : ReadError {
  using ReadError::ReadError;
};

/// JSON that ends with a checksum of all that stands before it. Doubles keep every bit.
std::string manifest_to_json(const Manifest& manifest);

/// Throws NewerFormatError, or ReadError naming `path` for anything but what manifest_to_json
/// writes: other checksum, broken JSON, depth > 8, a file name with a folder in it.
Manifest parse_manifest(std::string_view text, const std::string& path);

/// FileRecords and values on their way between ranks.
std::string records_to_json(const std::vector<FileRecord>& files);
std::vector<FileRecord> parse_records(std::string_view text);

}  // namespace ddp::detail
