// SPDX-License-Identifier: Apache-2.0
// Names the module in whose forward LibTorch raised an error. Only errors pay for it: the frames of
// the error name classes, and the model names its modules of that class.
#include <algorithm>
#include <optional>
#include <string_view>

#include "core/log/error_text.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/module_tensors.hpp"

namespace ddp::detail {
namespace {

bool holds(std::string_view function, std::string_view part) {
  const auto at = function.find(part);
  // "Net::forward(" is no part of "other::Net::forward(".
  return at != function.npos && (at == 0 || function[at - 1] == ' ');
}

// torch::nn::Sequential calls a module by a holder, into which the module's forward may be inlined.
bool is_forward_of(std::string_view function, const std::string& class_name) {
  return holds(function, class_name + "::forward(") || holds(function, class_name + "::forward<") ||
         function.find("::AnyModuleHolder<" + class_name + ",") != function.npos;
}

// "at::_ops::view::call(…)" -> "aten::view".
std::optional<std::string> op_of(std::string_view function) {
  constexpr std::string_view kBegin = "at::_ops::", kEnd = "::call(";
  const auto end = function.find(kEnd);
  if (!function.starts_with(kBegin) || end == function.npos) {
    return std::nullopt;
  }
  return "aten::" + std::string(function.substr(kBegin.size(), end - kBegin.size()));
}

// "body.0 or body.1 (Block) of Net".
std::string describe_modules(const torch::nn::Module& model, const std::vector<std::string>& names,
                             const std::string& class_name) {
  constexpr std::size_t kShown = 4;
  if (std::find(names.begin(), names.end(), "") != names.end()) {
    return class_name;  // the model itself
  }
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    const bool is_last = i + 1 == names.size();
    text += (i == 0 ? "" : is_last ? " or " : ", ") + names[i];
  }
  if (names.size() > kShown) {
    text = concat("one of ", names.size(), " modules, ", text, ", …");
  }
  return concat(text, " (", class_name, ") of ", model.name());
}

std::string describe_place(const torch::nn::Module& model, const std::vector<ErrorFrame>& frames) {
  const auto modules = model.named_modules();
  std::optional<std::string> op;  // the last one is what the module called
  for (const auto& frame : frames) {
    if (auto found = op_of(frame.function)) {
      op = std::move(found);
    }
    std::vector<std::string> names;
    std::string class_name;
    for (const auto& entry : modules) {
      if (is_forward_of(frame.function, entry.value()->name())) {
        class_name = entry.value()->name();
        names.push_back(entry.key());
      }
    }
    if (!names.empty()) {
      return concat(op ? "in " + *op + " " : "", "in the forward of ",
                    describe_modules(model, names, class_name));
    }
  }
  return "in the forward of " + model.name();
}

}  // namespace

void add_forward_place(c10::Error& error, const torch::nn::Module& model) noexcept {
  if (!error.context().empty()) {
    return;  // an exported module or an inner model has named the place
  }
  try {
    error.add_context(describe_place(model, frames_of(error)));
  } catch (...) {  // the error itself must reach the caller
  }
}

}  // namespace ddp::detail
