// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <locale>
#include <sstream>

namespace ddp::detail {

/// Joins values by operator<<. Numbers have no digit grouping, whatever std::locale::global() is:
/// files, names and messages between ranks would otherwise depend on it.
class TextStream : public std::ostringstream {
 public:
  TextStream() { imbue(std::locale::classic()); }
};

}  // namespace ddp::detail
