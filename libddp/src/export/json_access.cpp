// SPDX-License-Identifier: Apache-2.0
#include "export/json_access.hpp"

#include <map>

#include "core/control/wire/bounded_json.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

template <typename T>
T look_up(const std::map<int64_t, T>& table, const nlohmann::json& json, const char* what) {
  const auto found = table.find(whole_number(json, 0, what));
  if (found == table.end()) {
    throw DataError(concat(what, " has the unknown number ", json.dump()));
  }
  return found->second;
}

}  // namespace

int64_t whole_number(const nlohmann::json& json, int64_t at_least, const char* what) {
  if (!fits_int64(json) || json.get<int64_t>() < at_least) {
    throw DataError(concat(what, " is ", printable(json.dump().substr(0, 40)),
                           ", not a whole number of at least ", at_least));
  }
  return json.get<int64_t>();
}

at::ScalarType scalar_type(const nlohmann::json& json) {
  static const std::map<int64_t, at::ScalarType> kTypes = {
      {1, at::kByte},          {2, at::kChar},           {3, at::kShort},
      {4, at::kInt},           {5, at::kLong},           {6, at::kHalf},
      {7, at::kFloat},         {8, at::kDouble},         {9, at::kComplexHalf},
      {10, at::kComplexFloat}, {11, at::kComplexDouble}, {12, at::kBool},
      {13, at::kBFloat16},     {28, at::kUInt16},        {29, at::kFloat8_e4m3fn},
      {30, at::kFloat8_e5m2},  {34, at::kUInt32},        {35, at::kUInt64},
  };
  return look_up(kTypes, json, "a dtype");
}

at::Layout layout(const nlohmann::json& json) {
  static const std::map<int64_t, at::Layout> kLayouts = {
      {1, at::kSparse},    {2, at::kSparseCsr}, {3, at::kSparseCsc}, {4, at::kSparseBsr},
      {5, at::kSparseBsc}, {6, at::kMkldnn},    {7, at::kStrided},
  };
  return look_up(kLayouts, json, "a layout");
}

at::MemoryFormat memory_format(const nlohmann::json& json) {
  static const std::map<int64_t, at::MemoryFormat> kFormats = {
      {1, at::MemoryFormat::Contiguous},
      {2, at::MemoryFormat::ChannelsLast},
      {3, at::MemoryFormat::ChannelsLast3d},
      {4, at::MemoryFormat::Preserve},
  };
  return look_up(kFormats, json, "a memory format");
}

}  // namespace ddp::detail
