// SPDX-License-Identifier: Apache-2.0
// The conditions on sizes that an export holds under, as Python checks them at each call.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "export/graph.hpp"
#include "export/graph_plan.hpp"

namespace ddp::detail {

/// A part of a condition in Python: (L['x'].size()[0] // 2) != 1.
struct GuardTerm {
  enum class Kind { Constant, Value, Size, Stride, StorageOffset, Call, And, Or };
  Kind kind = Kind::Constant;
  c10::IValue constant = {};
  std::size_t input = 0;      ///< whose value, size, stride or offset it is
  std::size_t dimension = 0;  ///< of Size and Stride
  std::string text = {};      ///< of these: as in the condition
  StackFunction function = {};
  std::vector<GuardTerm> operands = {};
};

/// By the path of an input's value, "['x'][0]": its index among the graph's inputs.
using GuardSources = std::map<std::string, std::size_t>;

/// Throws DataError for text that it does not know.
GuardTerm read_guard(const std::string& text, const GuardSources& sources);

class Guards {
 public:
  explicit Guards(const ExportedProgram& program);

  /// Conditions that this class cannot read and that nothing checks.
  const std::vector<std::string>& unreadable() const { return unreadable_; }
  /// `inputs` has one value per input of the graph. Throws SettingsError naming the condition and
  /// the sizes in it.
  void check(const std::vector<c10::IValue>& inputs) const;

 private:
  struct Guard {
    std::string text;
    GuardTerm term;
  };
  std::vector<Guard> guards_;
  std::vector<std::string> unreadable_;
};

}  // namespace ddp::detail
