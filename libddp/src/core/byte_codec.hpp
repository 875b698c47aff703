// SPDX-License-Identifier: Apache-2.0
// Little-endian numbers and length-prefixed text in a byte string, for the control plane's
// messages.
#pragma once

#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ddp::detail {

class ByteWriter {
 public:
  template <std::unsigned_integral T>
  ByteWriter& number(T value) {
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      bytes_.push_back(static_cast<char>(value >> (8 * i) & 0xff));
    }
    return *this;
  }
  ByteWriter& signed_number(int64_t value) { return number(static_cast<uint64_t>(value)); }
  ByteWriter& raw(std::string_view value) {
    bytes_.append(value);
    return *this;
  }
  ByteWriter& text(std::string_view value) {
    return number(static_cast<uint32_t>(value.size())).raw(value);
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

/// Reads the bytes of a ByteWriter. After a wrong length or the end, it yields zeros and empty
/// strings and `ok()` is false. Callers check once, at the end.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : bytes_(bytes) {}

  template <std::unsigned_integral T>
  T number() {
    const auto part = raw(sizeof(T));
    T value = 0;
    for (std::size_t i = 0; i < part.size(); ++i) {
      value =
          static_cast<T>(value | static_cast<T>(static_cast<unsigned char>(part[i])) << (8 * i));
    }
    return value;
  }
  int64_t signed_number() { return static_cast<int64_t>(number<uint64_t>()); }
  std::string_view raw(std::size_t count) {
    if (count > bytes_.size()) {
      ok_ = false;
      bytes_ = {};
      return {};
    }
    const auto part = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return part;
  }
  std::string text() { return std::string(raw(number<uint32_t>())); }

  bool ok() const { return ok_; }
  /// Everything was read and no bytes remain.
  bool finished() const { return ok_ && bytes_.empty(); }

 private:
  std::string_view bytes_;
  bool ok_ = true;
};

}  // namespace ddp::detail
