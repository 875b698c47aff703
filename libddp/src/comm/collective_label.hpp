// SPDX-License-Identifier: Apache-2.0
// What a collective is for: messages, traces and reports of hanging jobs show it. Torch-free.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "core/control/rank_position.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

/// "bucket 4: layer2.1.conv2.weight … layer2.0.bn1.bias". The part before the colon is the short
/// form. Null: not known. Each recent collective keeps its label, so one text is made once and
/// shared.
using CollectiveLabel = std::shared_ptr<const std::string>;

inline CollectiveLabel make_label(std::string text) {
  return std::make_shared<const std::string>(std::move(text));
}

/// Collectives that this thread calls in the scope have the label. The innermost scope counts.
class LabelScope {
 public:
  /// `label` outlives the scope.
  explicit LabelScope(const CollectiveLabel& label) : outer_(std::exchange(current_, &label)) {}
  ~LabelScope() { current_ = outer_; }
  LabelScope(const LabelScope&) = delete;
  LabelScope& operator=(const LabelScope&) = delete;

  /// This thread's label.
  static CollectiveLabel current() { return current_ == nullptr ? nullptr : *current_; }
  static std::string current_text() {
    return current_ == nullptr || *current_ == nullptr ? std::string() : **current_;
  }
  /// The name of a collective's span in a trace: "bucket 4: all_reduce".
  static std::string trace_name(const char* collective) {
    const auto text = current_text();
    return text.empty() ? collective : concat(text.substr(0, text.find(':')), ": ", collective);
  }

 private:
  inline static thread_local const CollectiveLabel* current_ = nullptr;
  const CollectiveLabel* const outer_;
};

}  // namespace ddp::detail
