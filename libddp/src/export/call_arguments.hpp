// SPDX-License-Identifier: Apache-2.0
// Python's call convention: arguments of a forward as the flat inputs of a program.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "export/graph.hpp"

namespace ddp::detail {

/// An argument of Python's forward, and its containers.
struct ForwardArgument {
  std::string name;
  const TreeSpec* spec;  ///< of the program
};
/// The positional ones, then those by name.
std::vector<ForwardArgument> forward_arguments(const ExportedProgram& program);

class CallArguments {
 public:
  /// `program` outlives it.
  explicit CallArguments(const ExportedProgram& program);

  /// One value per user input and constant input of the program, in their order. Throws
  /// SettingsError naming the argument: missing, unknown, given twice, of another structure, or
  /// another value where the export fixed it.
  std::vector<c10::IValue> flat(const std::vector<c10::IValue>& positional,
                                const std::map<std::string, c10::IValue>& keywords) const;

 private:
  struct Parameter : ForwardArgument {
    std::vector<const InputSpec*> leaves;

    bool is_fixed() const;
    void check_constants(const c10::IValue* values) const;
  };
  std::string names() const;
  void check_keywords(std::size_t num_positional,
                      const std::map<std::string, c10::IValue>& keywords) const;

  std::vector<Parameter> parameters_;
};

}  // namespace ddp::detail
