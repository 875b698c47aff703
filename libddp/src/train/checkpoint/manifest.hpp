// SPDX-License-Identifier: Apache-2.0
// The contents of a checkpoint's manifest.json. Torch-free.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/files/file_ops.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

/// A reader refuses a checkpoint with a greater number. Format 3 has files of parts; other
/// checkpoints have format 1, which older programs read too. Format 2 is of earlier versions: it
/// has masters of a pair other than kDefaultPair.
inline constexpr int64_t kCheckpointFormat = 3;
inline constexpr const char* kManifestName = "manifest.json";
/// The names of a model and of the optimizer that holds its masters.
inline constexpr const char* kDefaultPair = "model/optimizer";

/// The same type as ddp::StateValue, whose header needs LibTorch.
using ManifestValue = std::variant<bool, int64_t, double, std::string>;

struct Manifest {
  int64_t format = 1;
  int64_t step = 0;  ///< steps done
  int64_t world_size = 1;
  std::optional<double> metric = {};
  /// "min" or "max": the better metric. Empty: not known, or an older program saved it.
  std::string keep_best = "";
  int64_t samples_per_step = 0;  ///< of all ranks; 0: not known, or an older program saved it
  bool finite = true;  ///< false if a tensor has inf or NaN or set_before_save() gave a reason;
                       ///< true if an older program saved it
  bool finite_is_known = true;  ///< false: an older program saved it without this check
  std::vector<FileRecord> files = {};
  std::map<std::string, std::map<std::string, ManifestValue>> values = {};  ///< by object, by key
  /// The dtypes of parameters that an earlier version saved as their master, by pair
  /// ("generator/its_optimizer") and parameter. Not written.
  std::map<std::string, std::map<std::string, std::string>> leaf_dtypes = {};
  std::map<std::string, std::string> texts = {};  ///< "settings", "plan", …

  bool operator==(const Manifest&) const = default;
};

/// A newer program wrote this checkpoint; using an older one would silently lose work.
struct NewerFormatError : ReadError {
  using ReadError::ReadError;
};

/// JSON with a checksum of all preceding text at its end. Doubles keep every bit. Throws WriteError
/// if it is longer than parse_manifest() reads.
std::string manifest_to_json(const Manifest& manifest);

/// Throws NewerFormatError, or ReadError naming `path` for text that manifest_to_json does not
/// write: other checksum, broken JSON, depth > 8, a file name with a folder in it.
Manifest parse_manifest(std::string_view text, const std::string& path);

}  // namespace ddp::detail
