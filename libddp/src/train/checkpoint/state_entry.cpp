// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint/state_entry.hpp"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/control/wire/bounded_json.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMaxDepth = 4;
constexpr std::size_t kMaxDims = 64;

std::vector<int64_t> numbers_from_json(const Json& list) {
  std::vector<int64_t> numbers;
  for (const auto& number : list) {
    if (!fits_int64(number) || number.get<int64_t>() < 0) {
      throw ReadError(concat(number.dump().substr(0, 40), " is not a whole number of at least 0"));
    }
    numbers.push_back(number.get<int64_t>());
  }
  if (numbers.size() > kMaxDims) {
    throw ReadError(concat("a tensor has ", numbers.size(), " dimensions, at most ", kMaxDims));
  }
  return numbers;
}

// The number of elements; nothing if it exceeds int64_t.
std::optional<int64_t> checked_numel(const std::vector<int64_t>& sizes) {
  int64_t numel = 1;
  for (const auto size : sizes) {
    if (size > 0 && numel > std::numeric_limits<int64_t>::max() / size) {
      return std::nullopt;
    }
    numel *= size;
  }
  return numel;
}

// Whether the elements fill a run of memory: in the order of strides, each stride is the number of
// elements of the dimensions before.
bool is_dense(const StateSlice& slice) {
  if (slice.strides.size() != slice.sizes.size()) {
    return false;
  }
  if (std::find(slice.sizes.begin(), slice.sizes.end(), 0) != slice.sizes.end()) {
    return true;
  }
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (std::size_t i = 0; i < slice.sizes.size(); ++i) {
    if (slice.sizes[i] != 1) {
      dims.emplace_back(slice.strides[i], slice.sizes[i]);
    }
  }
  std::sort(dims.begin(), dims.end());
  int64_t stride = 1;
  for (const auto& [found, size] : dims) {
    if (found != stride) {
      return false;
    }
    stride *= size;
  }
  return true;
}

StateEntry entry_from_json(const Json& json) {
  StateEntry entry{.object = json.at("object").get<std::string>(),
                   .key = StateKey(json.at("parameter").get<std::string>()),
                   .slice = {.sizes = numbers_from_json(json.at("sizes")),
                             .strides = numbers_from_json(json.at("strides")),
                             .begin = numbers_from_json(Json::array({json.at("begin")})).front()}};
  entry.key.parameter = json.at("parameter").get<std::string>();
  entry.key.slot = json.at("slot").get<std::string>();
  if (!checked_numel(entry.slice.sizes) || !is_dense(entry.slice)) {
    throw ReadError(
        concat("the sizes and strides of ", entry.key.text(), " are of no dense tensor"));
  }
  return entry;
}

}  // namespace

std::string entries_to_json(const std::vector<StateEntry>& entries) {
  Json list = Json::array();
  for (const auto& entry : entries) {
    list.push_back({{"object", entry.object},
                    {"parameter", entry.key.parameter},
                    {"slot", entry.key.slot},
                    {"sizes", entry.slice.sizes},
                    {"strides", entry.slice.strides},
                    {"begin", entry.slice.begin}});
  }
  return list.dump();
}

std::vector<StateEntry> parse_entries(std::string_view text, const std::string& path) {
  std::string reason;
  try {
    std::vector<StateEntry> entries;
    for (const auto& json : parse_bounded_json<Json>(text, kMaxDepth)) {
      entries.push_back(entry_from_json(json));
    }
    return entries;
  } catch (const ReadError& error) {
    reason = error.what();
  } catch (const nlohmann::json::exception& error) {
    reason = error.what();
  }
  throw ReadError(concat(path, " does not say what its tensors are: ", reason));
}

bool same_order(const StateSlice& a, const StateSlice& b) {
  if (a.sizes != b.sizes) {
    return false;
  }
  if (*checked_numel(a.sizes) == 0) {
    return true;
  }
  for (std::size_t i = 0; i < a.sizes.size(); ++i) {
    if (a.sizes[i] != 1 && a.strides[i] != b.strides[i]) {
      return false;
    }
  }
  return true;
}

void require_fits(const StateEntry& entry, const at::Tensor& tensor, const std::string& path) {
  const int64_t numel = *checked_numel(entry.slice.sizes);
  if (tensor.dim() != 1 || entry.slice.begin > numel - tensor.numel()) {
    throw ReadError(concat(path, ": ", entry.key.text(), " has shape ", tensor.sizes(),
                           ", which is no part from element ", entry.slice.begin, " of ", numel));
  }
}

}  // namespace ddp::detail
