// SPDX-License-Identifier: Apache-2.0
// Structs as messages between ranks. A struct names its members once:
//
//   struct Report {
//     int64_t step = 0;
//     std::string reason;
//     friend auto message_fields(Report& report) { return std::tie(report.step, report.reason); }
//     bool is_valid() const { return step >= 0; }  // optional: limits on received values, also as
//                                                  // a member of another message
//   };
//
// Members are bools, integers, enumerations, doubles, strings, such structs, and vectors, maps,
// pairs and optionals of them.
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ddp/core/control_plane.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

/// Writes little-endian numbers and length-prefixed strings.
class ByteWriter {
 public:
  template <std::unsigned_integral T>
  ByteWriter& number(T value) {
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      bytes_.push_back(static_cast<char>(value >> (8 * i) & 0xff));
    }
    return *this;
  }
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

/// Reads the bytes of a ByteWriter. After a wrong length or the end it returns zeros and empty
/// strings, and ok() is false. Callers check once, at the end.
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
  /// A value that was read exceeds its limits.
  void fail() { ok_ = false; }
  /// Everything was read and no bytes remain.
  bool finished() const { return ok_ && bytes_.empty(); }

 private:
  std::string_view bytes_;
  bool ok_ = true;
};

template <typename T>
struct IsMessageVector : std::false_type {};
template <typename T>
struct IsMessageVector<std::vector<T>> : std::true_type {};
template <typename T>
struct IsMessageOptional : std::false_type {};
template <typename T>
struct IsMessageOptional<std::optional<T>> : std::true_type {};
template <typename T>
concept MessageMap = requires {
  typename T::mapped_type;
};

template <typename T>
void write_value(ByteWriter& writer, const T& value) {
  const auto write_all = [&](const auto&... parts) { (write_value(writer, parts), ...); };
  if constexpr (std::is_same_v<T, double>) {
    writer.number(std::bit_cast<uint64_t>(value));
  } else if constexpr (std::is_integral_v<T> || std::is_enum_v<T>) {
    writer.number(static_cast<uint64_t>(value));
  } else if constexpr (std::is_same_v<T, std::string>) {
    writer.text(value);
  } else if constexpr (IsMessageVector<T>::value || MessageMap<T>) {
    writer.number(static_cast<uint32_t>(value.size()));
    for (const auto& element : value) {
      write_value(writer, element);
    }
  } else if constexpr (IsMessageOptional<T>::value) {
    write_value(writer, value.has_value());
    if (value) {
      write_value(writer, *value);
    }
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply(write_all, value);
  } else {
    std::apply(write_all, message_fields(const_cast<T&>(value)));
  }
}

template <typename T>
void read_value(ByteReader& reader, T& value) {
  const auto read_all = [&](auto&... parts) { (read_value(reader, parts), ...); };
  if constexpr (std::is_same_v<T, double>) {
    value = std::bit_cast<double>(reader.number<uint64_t>());
  } else if constexpr (std::is_integral_v<T> || std::is_enum_v<T>) {
    const auto number = reader.number<uint64_t>();
    value = static_cast<T>(number);
    if (static_cast<uint64_t>(value) != number) {  // not a T that was written
      reader.fail();
    }
  } else if constexpr (std::is_same_v<T, std::string>) {
    value = reader.text();
  } else if constexpr (IsMessageVector<T>::value) {
    for (auto left = reader.number<uint32_t>(); left > 0 && reader.ok(); --left) {
      read_value(reader, value.emplace_back());
    }
  } else if constexpr (MessageMap<T>) {
    for (auto left = reader.number<uint32_t>(); left > 0 && reader.ok(); --left) {
      std::pair<typename T::key_type, typename T::mapped_type> entry;
      read_value(reader, entry);
      if (!value.empty() && !(value.rbegin()->first < entry.first)) {  // written in order
        reader.fail();
      }
      value.insert(std::move(entry));
    }
  } else if constexpr (IsMessageOptional<T>::value) {
    bool has_value = false;
    read_value(reader, has_value);
    if (has_value) {
      read_value(reader, value.emplace());
    }
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply(read_all, value);
  } else {
    std::apply(read_all, message_fields(value));
    if constexpr (requires { value.is_valid(); }) {
      if (!value.is_valid()) {
        reader.fail();
      }
    }
  }
}

template <typename T>
std::string encode_message(const T& value) {
  ByteWriter writer;
  write_value(writer, value);
  return writer.take();
}

/// Returns nothing unless `bytes` is what encode_message() makes of a valid T.
template <typename T>
std::optional<T> try_decode_message(std::string_view bytes) {
  ByteReader reader(bytes);
  T value{};
  read_value(reader, value);
  return reader.finished() ? std::optional(std::move(value)) : std::nullopt;
}

/// Throws ReadError instead of returning nothing.
template <typename T>
T decode_message(std::string_view bytes) {
  auto value = try_decode_message<T>(bytes);
  if (!value) {
    throw ReadError(concat("a message of ", bytes.size(),
                           " bytes from another rank cannot be read; fix: start the same program "
                           "on all ranks"));
  }
  return *std::move(value);
}

template <typename T>
std::vector<T> decode_messages(const std::vector<std::string>& messages) {
  std::vector<T> values;
  for (const auto& message : messages) {
    values.push_back(decode_message<T>(message));
  }
  return values;
}

/// The control plane's calls of the same names with values of type T.
template <typename T>
std::vector<T> all_gather_messages(ControlPlane& control_plane, const T& value) {
  return decode_messages<T>(control_plane.all_gather(encode_message(value)));
}
template <typename T>
std::vector<T> gather_messages(ControlPlane& control_plane, const T& value) {
  return decode_messages<T>(control_plane.gather(encode_message(value)));
}
template <typename T>
T broadcast_message(ControlPlane& control_plane, const T& value) {
  return decode_message<T>(control_plane.broadcast(encode_message(value)));
}

}  // namespace ddp::detail
