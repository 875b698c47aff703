// SPDX-License-Identifier: Apache-2.0
#include "export/fusion/pattern_arguments.hpp"

#include <algorithm>
#include <limits>

namespace ddp::detail {
bool is_call_of(const Node& node, std::string_view overload) {
  constexpr std::string_view kOperators = "torch.ops.aten.";
  return node.target.starts_with(kOperators) &&
         std::string_view(node.target).substr(kOperators.size()) == overload;
}

bool is_value(const Argument* argument) {
  return argument != nullptr && argument->name() != nullptr;
}

bool has_values(const Node& node, std::initializer_list<const char*> names) {
  return std::all_of(names.begin(), names.end(),
                     [&](const char* name) { return is_value(node.input(name)); });
}

bool is_none(const Argument* argument) {
  return argument == nullptr || (argument->constant() && argument->constant()->isNone());
}

bool is_same_value(const Argument* a, const Argument* b) {
  return is_value(a) && is_value(b) && a->name()->name == b->name()->name;
}

bool are_same_sizes(const Argument& a, const Argument& b) {
  const auto is_same = [](const Argument& one, const Argument& other) {
    const auto integer = integer_of(&one, 0);
    return is_same_value(&one, &other) ||
           (integer != kNoInteger && integer == integer_of(&other, 0));
  };
  return a.list() && b.list() &&
         std::equal(a.list()->begin(), a.list()->end(), b.list()->begin(), b.list()->end(),
                    is_same);
}

int64_t integer_of(const Argument* argument, int64_t otherwise) {
  if (argument == nullptr) {
    return otherwise;
  }
  const auto* constant = argument->constant();
  return constant && constant->isInt() ? constant->toInt() : kNoInteger;
}

Integers integers_of(const Argument* argument, std::size_t size, int64_t otherwise) {
  const auto* list = argument ? argument->list() : nullptr;
  if (list == nullptr || list->size() == 1) {
    return Integers(size, integer_of(list ? &list->front() : argument, otherwise));
  }
  Integers values;
  for (const auto& item : *list) {
    values.push_back(integer_of(&item, kNoInteger));
  }
  return values.size() == size ? values : Integers(size, kNoInteger);
}

double number_of(const Argument* argument, double otherwise) {
  if (argument == nullptr) {
    return otherwise;
  }
  const auto* constant = argument->constant();
  return constant && (constant->isDouble() || constant->isInt())
             ? constant->toScalar().to<double>()
             : std::numeric_limits<double>::quiet_NaN();
}

std::optional<bool> truth_of(const Argument* argument, bool otherwise) {
  if (argument == nullptr) {
    return otherwise;
  }
  const auto* constant = argument->constant();
  return constant && constant->isBool() ? std::optional(constant->toBool()) : std::nullopt;
}

std::optional<Slice> slice_of(const Node& node) {
  if (!is_call_of(node, "slice.Tensor") || !is_value(node.input("self"))) {
    return std::nullopt;
  }
  return Slice{*node.input("self"), integer_of(node.input("dim"), 0),
               integer_of(node.input("start"), 0), integer_of(node.input("end"), Slice::kEnd),
               integer_of(node.input("step"), 1)};
}

bool pools_to_one_pixel(const Node& node) {
  return is_call_of(node, "adaptive_avg_pool2d.default") &&
         integers_of(node.input("output_size"), 2, kNoInteger) == Integers{1, 1};
}

bool is_plain_sum(const Node& node) {
  return (is_call_of(node, "add.Tensor") || is_call_of(node, "add_.Tensor")) &&
         has_values(node, {"self", "other"}) && integer_of(node.input("alpha"), 1) == 1;
}

std::optional<double> dropout_p_of(const Node& node) {
  const auto train = truth_of(node.input("train"), false);
  const double p = number_of(node.input("p"), -1);
  if (!is_call_of(node, "dropout.default") || !is_value(node.input("input")) || !train ||
      !(p >= 0 && p <= 1)) {
    return std::nullopt;
  }
  return *train ? p : 0;
}

}  // namespace ddp::detail
