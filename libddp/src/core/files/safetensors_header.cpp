// SPDX-License-Identifier: Apache-2.0
#include "core/files/safetensors_header.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

using Json = nlohmann::json;

constexpr std::pair<std::string_view, uint64_t> kDtypes[] = {
    {"BOOL", 1}, {"U8", 1},  {"I8", 1},   {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"I16", 2},
    {"U16", 2},  {"F16", 2}, {"BF16", 2}, {"I32", 4},     {"U32", 4},     {"F32", 4},
    {"I64", 8},  {"U64", 8}, {"F64", 8},  {"C64", 8},
};

// Nlohmann's SAX parser does not recurse, and no DOM is built. So a hostile header costs no more
// memory than its entries. Any error ends the parse with a reason.
class HeaderReader final : public nlohmann::json_sax<Json> {
 public:
  SafetensorsHeader header;
  std::string reason;

  bool null() override { return fail("null"); }
  bool boolean(bool) override { return fail("a boolean"); }
  bool number_integer(int64_t) override { return fail("a negative number"); }
  bool number_float(double, const std::string&) override { return fail("a fraction"); }
  bool binary(Json::binary_t&) override { return fail("binary data"); }

  bool number_unsigned(uint64_t value) override {
    if (state_ == State::Shape) {
      if (value > static_cast<uint64_t>(INT64_MAX) || entry_.shape.size() >= 64) {
        return fail("a dimension out of range");
      }
      entry_.shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (state_ == State::Offsets && num_offsets_ < 2) {
      (num_offsets_++ == 0 ? entry_.begin : entry_.end) = value;
      return true;
    }
    return fail("a number");
  }

  bool string(std::string& value) override {
    if (state_ == State::Metadata) {
      header.metadata[key_] = value;
      return true;
    }
    if (state_ == State::Entry && key_ == "dtype") {
      entry_.dtype = value;
      return true;
    }
    return fail("a text");
  }

  bool start_object(std::size_t) override {
    if (state_ == State::Start) {
      state_ = State::Top;
      return true;
    }
    if (state_ == State::Top) {
      seen_.clear();
      if (key_ == "__metadata__") {
        state_ = State::Metadata;
        return true;
      }
      entry_ = {};
      entry_.name = key_;
      num_offsets_ = 0;
      state_ = State::Entry;
      return true;
    }
    return fail("an object");
  }

  bool end_object() override {
    if (state_ == State::Entry) {
      if (seen_.size() != 3 || num_offsets_ != 2) {
        return fail("an entry without dtype, shape or two data_offsets");
      }
      header.entries.push_back(std::move(entry_));
    }
    state_ = state_ == State::Top ? State::Done : State::Top;
    return true;
  }

  bool start_array(std::size_t) override {
    if (state_ == State::Entry && (key_ == "shape" || key_ == "data_offsets")) {
      state_ = key_ == "shape" ? State::Shape : State::Offsets;
      return true;
    }
    return fail("a list");
  }

  bool end_array() override {
    state_ = State::Entry;
    return true;
  }

  bool key(std::string& value) override {
    key_ = value;
    if (state_ == State::Top) {
      if (names_.size() >= kMaxSafetensorsEntries) {
        return fail("more than 100000 entries");
      }
      return names_.insert(value).second || fail("the key '" + value + "' twice");
    }
    if (state_ == State::Entry && value != "dtype" && value != "shape" && value != "data_offsets") {
      return fail("an unknown key '" + value + "'");
    }
    if (seen_.size() >= kMaxSafetensorsEntries) {
      return fail("more than 100000 entries");
    }
    return seen_.insert(value).second || fail("the key '" + value + "' twice");
  }

  bool parse_error(std::size_t position, const std::string&, const Json::exception&) override {
    return fail("broken JSON at byte " + std::to_string(position));
  }

 private:
  enum class State { Start, Top, Metadata, Entry, Shape, Offsets, Done };

  bool fail(const std::string& what) {
    if (reason.empty()) {
      reason = what + (entry_.name.empty() ? "" : " (near '" + entry_.name.substr(0, 200) + "')");
    }
    return false;
  }

  State state_ = State::Start;
  std::string key_;
  std::set<std::string> names_;
  std::set<std::string> seen_;
  SafetensorsEntry entry_;
  int num_offsets_ = 0;
};

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw ReadError(path + " is not a valid safetensors file: " + why);
}

// Number of elements times element size in `bytes`. Returns what is wrong with the shape, or an
// empty string. Dimensions of 0 count as 1 in products of elements, because strides of such a
// tensor must not overflow.
std::string entry_bytes(const SafetensorsEntry& entry, uint64_t& bytes) {
  int64_t elements = 1;
  bool empty = false;
  for (const int64_t size : entry.shape) {
    empty = empty || size == 0;
    if (size != 0 && __builtin_mul_overflow(elements, size, &elements)) {
      return concat("its shape ", Json(entry.shape).dump(),
                    " has 2^63 elements or more, if dimensions of 0 count as 1");
    }
  }
  int64_t product = 0;
  if (!empty &&
      __builtin_mul_overflow(elements, static_cast<int64_t>(safetensors_dtype_bytes(entry.dtype)),
                             &product)) {
    return concat("its shape ", Json(entry.shape).dump(), " has 2^63 bytes or more");
  }
  bytes = static_cast<uint64_t>(product);
  return "";
}

// Any bytes as ASCII, for messages.
std::string quoted(const std::string& name) {
  return Json(name.substr(0, 200)).dump(-1, ' ', true, Json::error_handler_t::replace);
}

// A name or metadata text as JSON, which allows only UTF-8.
template <typename T>
std::string json_text(const T& value, const std::string& what) {
  try {
    return Json(value).dump();
  } catch (const Json::exception&) {
    throw WriteError(concat(what, " is not UTF-8, a safetensors file cannot hold it"));
  }
}

void check_entries(SafetensorsHeader& header, uint64_t data_bytes, const std::string& path) {
  std::stable_sort(header.entries.begin(), header.entries.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t covered = 0;
  for (const auto& entry : header.entries) {
    const std::string shown = "'" + entry.name.substr(0, 200) + "'";
    if (safetensors_dtype_bytes(entry.dtype) == 0) {
      refuse(path, shown + " has the unknown dtype '" + entry.dtype.substr(0, 32) + "'");
    }
    if (entry.begin != covered || entry.end < entry.begin) {
      refuse(path, concat(shown, " lies at bytes ", entry.begin, "..", entry.end,
                          " of the data, expected to start at ", covered));
    }
    uint64_t bytes = 0;
    if (const auto problem = entry_bytes(entry, bytes); !problem.empty()) {
      refuse(path, shown + ": " + problem);
    }
    if (bytes != entry.end - entry.begin) {
      refuse(path, shown + ": dtype and shape do not give its number of bytes");
    }
    covered = entry.end;
  }
  if (covered != data_bytes) {
    refuse(path, concat("its tensors cover ", covered, " bytes, the file holds ", data_bytes,
                        covered > data_bytes ? " (truncated?)" : " (trailing bytes?)"));
  }
}

}  // namespace

uint64_t safetensors_dtype_bytes(std::string_view dtype) {
  for (const auto& [name, bytes] : kDtypes) {
    if (name == dtype) {
      return bytes;
    }
  }
  return 0;
}

uint64_t parse_safetensors_length(const unsigned char* first8, uint64_t file_size,
                                  const std::string& path) {
  if (file_size < 8) {
    refuse(path, concat("it has only ", file_size, " bytes"));
  }
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) {
    length = length << 8 | first8[i];
  }
  if (length > kMaxSafetensorsHeaderBytes) {
    refuse(path, concat("its header claims ", length, " bytes, the limit is ",
                        kMaxSafetensorsHeaderBytes));
  }
  if (length > file_size - 8) {
    refuse(path, concat("its header claims ", length, " bytes, the file has ", file_size,
                        " (truncated?)"));
  }
  return length;
}

SafetensorsHeader parse_safetensors_header(std::string_view json, uint64_t file_size,
                                           const std::string& path) {
  if (json.empty() || json.front() != '{') {
    refuse(path, "its header does not start with '{'");
  }
  if (json.find('\0') != std::string_view::npos) {  // the parser would stop there
    refuse(path, "its header holds a zero byte");
  }
  HeaderReader reader;
  if (!Json::sax_parse(json.begin(), json.end(), &reader)) {
    refuse(path, "its header holds " + reader.reason);
  }
  reader.header.data_offset = 8 + json.size();
  check_entries(reader.header, file_size - reader.header.data_offset, path);
  return std::move(reader.header);
}

std::string make_safetensors_header(std::vector<SafetensorsEntry>& entries,
                                    const std::map<std::string, std::string>& metadata) {
  std::stable_sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    const auto size_a = safetensors_dtype_bytes(a.dtype);
    const auto size_b = safetensors_dtype_bytes(b.dtype);
    return size_a != size_b ? size_a > size_b : a.name < b.name;
  });
  std::string text = "{";
  const auto add_key = [&text](const std::string& key) {
    text += (text.size() > 1 ? "," : "") + json_text(key, "the tensor's name " + quoted(key)) + ":";
  };
  if (!metadata.empty()) {
    add_key("__metadata__");
    text += json_text(metadata, "the metadata");
  }
  uint64_t offset = 0;
  for (auto& entry : entries) {
    uint64_t bytes = 0;
    if (entry.name == "__metadata__" || !entry_bytes(entry, bytes).empty()) {
      throw WriteError(concat("a safetensors file cannot hold a tensor named ", quoted(entry.name),
                              " of ", entry.dtype, " ", Json(entry.shape).dump()));
    }
    entry.begin = offset;
    entry.end = offset += bytes;
    add_key(entry.name);
    text += "{\"dtype\":\"" + entry.dtype + "\",\"shape\":" + Json(entry.shape).dump() +
            concat(",\"data_offsets\":[", entry.begin, ",", entry.end, "]}");
  }
  text += "}";
  text.append((8 - text.size() % 8) % 8, ' ');
  // The writer obeys the reader's limits: every saved file can be loaded.
  if (text.size() > kMaxSafetensorsHeaderBytes || entries.size() > kMaxSafetensorsEntries) {
    throw WriteError(
        concat("a safetensors file may have 100000 tensors and a header of 16 MiB, not ",
               entries.size(), " and ", text.size() >> 20, " MiB"));
  }
  std::string prefix(8, '\0');
  for (int i = 0; i < 8; ++i) {
    prefix[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  }
  return prefix + text;
}

}  // namespace ddp::detail
