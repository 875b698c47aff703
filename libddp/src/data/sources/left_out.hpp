// SPDX-License-Identifier: Apache-2.0
// The files that a reader of images leaves out, for one log line.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ddp::detail {

class LeftOut {
 public:
  /// `kind` is a plural noun: "files with other extensions". If a file may hold samples, somebody
  /// may miss them: the line becomes a warning.
  void add(const std::string& kind, const std::string& name, bool may_hold_samples);

  /// Logs the number of each kind and the first names, or nothing if no file was left out. `where`
  /// is the data set's split.
  void log(const std::string& where) const;

 private:
  struct Kind {
    int64_t count = 0;
    std::vector<std::string> first_names;
  };
  std::map<std::string, Kind> kinds_;
  bool may_miss_samples_ = false;
};

}  // namespace ddp::detail
