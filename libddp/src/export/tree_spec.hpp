// SPDX-License-Identifier: Apache-2.0
// Nested Python containers as a flat list of values, and back (torch.utils._pytree).
#pragma once

#include <ATen/core/ivalue.h>

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace ddp::detail {

struct TreeSpec {
  enum class Kind { Leaf, List, Tuple, Dict };
  Kind kind = Kind::Leaf;
  std::vector<std::string> keys;  ///< of a Dict: the names of its children
  std::vector<TreeSpec> children;

  std::size_t num_leaves() const;
};

/// Reads the text of treespec_dumps(). A dataclass, a namedtuple or a ModelOutput becomes a Dict of
/// its fields. Throws DataError for a container that it does not know.
TreeSpec read_tree_spec(const std::string& text,
                        const std::map<std::string, std::vector<std::string>>& namedtuple_fields);

/// Builds the containers over `leaves`, which has spec.num_leaves() elements.
c10::IValue unflatten(const TreeSpec& spec, const std::vector<c10::IValue>& leaves);

/// Appends the leaves of `value` in the order of `spec`. Throws SettingsError if the containers
/// differ; `what` names the value.
void flatten(const TreeSpec& spec, const c10::IValue& value, const std::string& what,
             std::vector<c10::IValue>& leaves);

}  // namespace ddp::detail
