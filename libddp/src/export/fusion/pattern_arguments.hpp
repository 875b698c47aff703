// SPDX-License-Identifier: Apache-2.0
// What patterns ask about a node's arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

#include "export/graph.hpp"

namespace ddp::detail {

using Integers = std::vector<int64_t>;

/// Whether the node calls exactly this overload of aten ("view.default") and was not replaced.
bool is_call_of(const Node& node, std::string_view overload);

/// Whether the argument is given and is a value of the graph: a tensor or a size.
bool is_value(const Argument* argument);
bool has_values(const Node& node, std::initializer_list<const char*> names);
/// Whether the argument is missing or None.
bool is_none(const Argument* argument);
/// Whether both are the same value of the graph.
bool is_same_value(const Argument* a, const Argument* b);
/// Whether both are lists of the same values and integers.
bool are_same_sizes(const Argument& a, const Argument& b);

inline constexpr int64_t kNoInteger = std::numeric_limits<int64_t>::min();
/// `otherwise` for a missing argument, kNoInteger for one that is no constant integer.
int64_t integer_of(const Argument* argument, int64_t otherwise);
/// The same for a list of `size` integers, or one integer for all. kNoInteger also for another
/// length.
Integers integers_of(const Argument* argument, std::size_t size, int64_t otherwise);
/// `otherwise` for a missing argument, NaN for one that is no constant number.
double number_of(const Argument* argument, double otherwise);
/// `otherwise` for a missing argument. Empty for one that is no constant bool.
std::optional<bool> truth_of(const Argument* argument, bool otherwise);

/// What a slice takes of its value. A negative number counts from the end, kNoInteger is unknown.
struct Slice {
  static constexpr int64_t kEnd = std::numeric_limits<int64_t>::max();

  Argument x;
  int64_t dim = 0, start = 0, end = kEnd, step = 1;
};
/// Empty for a node that is no slice of a value of the graph.
std::optional<Slice> slice_of(const Node& node);

/// Whether the node averages images to one pixel, by adaptive_avg_pool2d.
bool pools_to_one_pixel(const Node& node);

/// aten.add of two values of the graph, without a factor, also in place.
bool is_plain_sum(const Node& node);
/// p of aten.dropout, 0 outside training. Empty for other nodes.
std::optional<double> dropout_p_of(const Node& node);

}  // namespace ddp::detail
