// SPDX-License-Identifier: Apache-2.0
// The divided tensors in one file of a checkpoint, in its metadata "entries".
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ddp/core/state_dict.hpp"

namespace ddp::detail {

/// The metadata's name in the file.
inline constexpr const char* kEntriesName = "entries";

/// A tensor of the file: a part of `slot` of `parameter` of `object`.
struct StateEntry {
  std::string object;
  StateKey key;  ///< parameter and slot
  StateSlice slice;
  bool operator==(const StateEntry&) const = default;
};

/// A JSON list.
std::string entries_to_json(const std::vector<StateEntry>& entries);

/// Throws ReadError naming `path` for text that entries_to_json() does not write, or a slice that
/// no dense tensor has.
std::vector<StateEntry> parse_entries(std::string_view text, const std::string& path);

/// Whether both are of tensors with equal sizes and the same order in memory.
bool same_order(const StateSlice& a, const StateSlice& b);

/// Throws ReadError naming `path` if `tensor` is not one that the entry can describe.
void require_fits(const StateEntry& entry, const at::Tensor& tensor, const std::string& path);

}  // namespace ddp::detail
