// SPDX-License-Identifier: Apache-2.0
#include "ddp/core/fields.hpp"

#include <algorithm>

namespace ddp {

void FieldVisitor::field(Field info, int& value) {
  info.min = std::max<double>(info.min, std::numeric_limits<int>::min());
  info.max = std::min<double>(info.max, std::numeric_limits<int>::max());
  int64_t wide = value;
  field(info, wide);
  value = static_cast<int>(wide);
}

void FieldVisitor::field(Field info, std::chrono::milliseconds& value) {
  info.unit = "ms";
  int64_t count = value.count();
  field(info, count);
  value = std::chrono::milliseconds(count);
}

Section uses(std::vector<std::string> keys) {
  return {.name = "", .describe = [](FieldVisitor&) {}, .used_keys = std::move(keys)};
}

}  // namespace ddp
