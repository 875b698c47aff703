// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/files/tensorboard_events.hpp"

#include <array>
#include <bit>
#include <cmath>

#include "core/control/wire/message_codec.hpp"
#include "core/settings/parse_number.hpp"

namespace ddp::detail::tensorboard {
namespace {

/// A message in protobuf's encoding. Field numbers are those of the .proto files.
class Message {
 public:
  Message& integer(unsigned field, uint64_t value) {
    varint(field << 3 | kVarint);
    varint(value);
    return *this;
  }
  Message& fixed64(unsigned field, double value) {
    varint(field << 3 | kFixed64);
    bytes_.number(std::bit_cast<uint64_t>(value));
    return *this;
  }
  Message& fixed32(unsigned field, float value) {
    varint(field << 3 | kFixed32);
    bytes_.number(std::bit_cast<uint32_t>(value));
    return *this;
  }
  Message& bytes(unsigned field, std::string_view value) {
    varint(field << 3 | kBytes);
    varint(value.size());
    bytes_.raw(value);
    return *this;
  }
  Message& message(unsigned field, Message& value) { return bytes(field, value.take()); }
  std::string take() { return bytes_.take(); }

 private:
  enum WireType : unsigned { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

  void varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) {
      bytes_.number(static_cast<uint8_t>(value | 0x80));
    }
    bytes_.number(static_cast<uint8_t>(value));
  }

  ByteWriter bytes_;
};

enum DataType : uint64_t { kFloat = 1, kString = 7 };

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = crc >> 1 ^ ((crc & 1) != 0 ? 0x82f63b78u : 0);
    }
    table[byte] = crc;
  }
  return table;
}

uint32_t masked_crc(std::string_view bytes) {
  return std::rotr(crc32c(bytes), 15) + 0xa282ead8u;
}

/// Event: wall_time 1, step 2, file_version 3, summary 5, session_log 7.
Message event(const EventTime& time) {
  Message event;
  event.fixed64(1, time.unix_time).integer(2, static_cast<uint64_t>(time.step));
  return event;
}

/// TensorProto of one dimension: dtype 1, tensor_shape 2 (dim 2, size 1), string_val 8.
Message tensor(DataType type, const std::vector<std::string>& strings) {
  Message dim, shape, tensor;
  dim.integer(1, strings.size());
  shape.message(2, dim);
  tensor.integer(1, type).message(2, shape);
  for (const std::string& text : strings) {
    tensor.bytes(8, text);
  }
  return tensor;
}

/// An event whose Summary has one Value: tag 1, tensor 8, metadata 9. The metadata's plugin_data 1
/// is plugin_name 1 and content 2.
std::string plugin_event(const EventTime& time, const std::string& tag, Message tensor,
                         const std::string& plugin, const std::string& content) {
  Message plugin_data, metadata, value, summary;
  plugin_data.bytes(1, plugin).bytes(2, content);
  metadata.message(1, plugin_data);
  value.bytes(1, tag).message(8, tensor).message(9, metadata);
  summary.message(1, value);
  return event(time).message(5, summary).take();
}

/// google.protobuf.Value: number_value 2, string_value 3, bool_value 4.
Message json_value(const std::string& text) {
  Message value;
  if (text == "true" || text == "false") {
    value.integer(4, text == "true" ? 1 : 0);
  } else if (const auto number = parse_number<double>(text); number && std::isfinite(*number)) {
    value.fixed64(2, *number);
  } else {
    value.bytes(3, text);
  }
  return value;
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  static constexpr auto kTable = make_crc_table();
  uint32_t crc = ~0u;
  for (const char c : bytes) {
    crc = crc >> 8 ^ kTable[(crc ^ static_cast<unsigned char>(c)) & 0xff];
  }
  return ~crc;
}

std::string framed(std::string_view data) {
  const auto length = ByteWriter().number(static_cast<uint64_t>(data.size())).take();
  return ByteWriter()
      .raw(length)
      .number(masked_crc(length))
      .raw(data)
      .number(masked_crc(data))
      .take();
}

std::string file_version_event(const EventTime& time) {
  return event(time).bytes(3, "brain.Event:2").take();
}

std::string restart_event(const EventTime& time) {
  Message session_log;
  session_log.integer(1, 1);  // status: START
  return event(time).message(7, session_log).take();
}

std::string scalars_event(const EventTime& time,
                          const std::vector<std::pair<std::string, double>>& scalars) {
  Message summary;
  for (const auto& [tag, number] : scalars) {  // Summary.Value: simple_value 2
    Message value;
    value.bytes(1, tag).fixed32(2, static_cast<float>(number));
    summary.message(1, value);
  }
  return event(time).message(5, summary).take();
}

std::string text_event(const EventTime& time, const std::string& tag, const std::string& markdown) {
  return plugin_event(time, tag, tensor(kString, {markdown}), "text", "");
}

std::string hparams_event(const EventTime& time, const std::string& name,
                          const std::vector<Hparam>& hparams) {
  // SessionStartInfo: hparams 1 (a map), group_name 4, start_time_secs 5. It is field 3 of
  // HParamsPluginData.
  Message session, data;
  for (const Hparam& hparam : hparams) {
    Message entry, value = json_value(hparam.value);
    entry.bytes(1, hparam.name).message(2, value);
    session.message(1, entry);
  }
  session.bytes(4, name).fixed64(5, time.unix_time);
  data.message(3, session);
  return plugin_event(time, "_hparams_/session_start_info", tensor(kFloat, {}), "hparams",
                      data.take());
}

}  // namespace ddp::detail::tensorboard
