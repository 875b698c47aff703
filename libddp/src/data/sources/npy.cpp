// SPDX-License-Identifier: Apache-2.0
// NumPy's array files (numpy.lib.format):
//
//   \x93NUMPY | u8 major | u8 minor | length n: u16 (1.0) or u32 (2.0, 3.0) | n bytes of header |
//   data
//   {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/files/file_mapping.hpp"
#include "core/settings/parse_number.hpp"
#include "ddp/core/error.hpp"
#include "ddp/data/tensor_dataset.hpp"
#include "ddp/detail/file_content.hpp"

namespace ddp {
namespace {

constexpr std::pair<const char*, at::ScalarType> kDtypes[] = {
    {"b1", at::kBool},         {"i1", at::kChar},           {"u1", at::kByte},
    {"i2", at::kShort},        {"u2", at::kUInt16},         {"f2", at::kHalf},
    {"i4", at::kInt},          {"u4", at::kUInt32},         {"f4", at::kFloat},
    {"i8", at::kLong},         {"u8", at::kUInt64},         {"f8", at::kDouble},
    {"c8", at::kComplexFloat}, {"c16", at::kComplexDouble},
};
constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kMaxHeaderBytes = std::size_t{1} << 20;
constexpr std::size_t kMaxDimensions = 64;  // as in NumPy and LibTorch

/// A file's bytes for a message.
std::string printable(std::string_view bytes) {
  std::string text(bytes);
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

struct NpyHeader {
  std::string descr;
  bool fortran_order = false;
  std::vector<int64_t> shape;
};

[[noreturn]] void refuse(const std::string& path, const std::string& why,
                         const std::string& fix = "write it again with numpy.save()") {
  throw DataError(concat(path, " cannot be read as an array: ", why, "; fix: ", fix));
}

// Parses the dictionary literal of a header, which NumPy's reader gives to Python.
class HeaderReader {
 public:
  HeaderReader(std::string_view text, const std::string& path) : text_(text), path_(path) {}

  NpyHeader read() {
    NpyHeader header;
    std::vector<std::string> keys;
    expect('{');
    while (!take('}')) {
      keys.push_back(read_string());
      expect(':');
      read_value(keys.back(), header);
      if (!take(',')) {
        expect('}');
        break;
      }
    }
    skip_blanks();
    std::sort(keys.begin(), keys.end());
    if (at_ != text_.size() ||
        keys != std::vector<std::string>{"descr", "fortran_order", "shape"}) {
      fail();
    }
    return header;
  }

 private:
  [[noreturn]] void fail() const {
    refuse(path_, concat("its header is damaged at byte ", at_, ": ",
                         printable(text_.substr(0, std::min<std::size_t>(text_.size(), 200)))));
  }
  void skip_blanks() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) {
      ++at_;
    }
  }
  bool take(char c) {
    skip_blanks();
    const bool found = at_ < text_.size() && text_[at_] == c;
    at_ += found ? 1 : 0;
    return found;
  }
  void expect(char c) {
    if (!take(c)) {
      fail();
    }
  }
  bool take_word(std::string_view word) {
    skip_blanks();
    const bool found = text_.substr(at_, word.size()) == word;
    at_ += found ? word.size() : 0;
    return found;
  }
  std::string read_string() {
    const char quote = take('\'') ? '\'' : '"';
    if (quote == '"') {
      expect('"');
    }
    const auto end = text_.find(quote, at_);
    if (end == std::string_view::npos) {
      fail();
    }
    const auto begin = std::exchange(at_, end + 1);
    return std::string(text_.substr(begin, end - begin));
  }
  void read_value(const std::string& key, NpyHeader& header) {
    if (key == "fortran_order") {
      header.fortran_order = take_word("True");
      if (!header.fortran_order && !take_word("False")) {
        fail();
      }
    } else if (key == "shape") {
      read_shape(header.shape);
    } else if (key != "descr") {
      fail();
    } else if (skip_blanks(); text_.substr(at_, 1) == "[" || text_.substr(at_, 1) == "(") {
      refuse(path_, "it has named fields or elements that are arrays",
             "save each field as an array of its own");
    } else {
      header.descr = read_string();
    }
  }
  void read_shape(std::vector<int64_t>& shape) {
    expect('(');
    while (!take(')')) {
      skip_blanks();
      const auto end = std::min(text_.find_first_not_of("0123456789", at_), text_.size());
      const auto size = detail::parse_number<int64_t>(text_.substr(at_, end - at_));
      if (!size || shape.size() == kMaxDimensions) {
        fail();
      }
      shape.push_back(*size);
      at_ = end;
      take('L');  // Python 2 wrote long numbers so
      if (!take(',')) {
        expect(')');
        break;
      }
    }
  }

  std::string_view text_;
  const std::string& path_;
  std::size_t at_ = 0;
};

at::ScalarType dtype_of(const std::string& descr, const std::string& path) {
  const std::string kind = descr.substr(std::min<std::size_t>(descr.size(), 1));
  const auto* found = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                                   [&](const auto& entry) { return kind == entry.first; });
  const std::string shown = printable(descr.substr(0, 64));
  if (kind.starts_with('O')) {
    refuse(path, "its elements are Python objects ('" + shown + "')",
           "save numbers, for example numpy.save(path, array.astype('<f4'))");
  }
  if (found == std::end(kDtypes) || std::string_view("<>=|").find(descr[0]) == std::string::npos) {
    refuse(path,
           "its dtype is '" + shown +
               "'; allowed are bool, int8 to int64, uint8 to uint64, float16, float32, float64, "
               "complex64 and complex128",
           "save one of these, for example numpy.save(path, array.astype('<f4'))");
  }
  if (descr[0] == '>' && kind.back() != '1') {
    refuse(path, "its numbers are big-endian ('" + shown + "')",
           "numpy.save(path, array.astype('<" + kind + "'))");
  }
  return found->second;
}

// Where the header begins, and its length.
std::pair<std::size_t, std::size_t> find_header(std::string_view file, const std::string& path) {
  if (!file.starts_with(kMagic) || file.size() < 10) {
    refuse(path, "it does not begin like a .npy file" + content_note(file));
  }
  const auto byte = [&](std::size_t i) { return std::size_t{static_cast<unsigned char>(file[i])}; };
  if (byte(6) < 1 || byte(6) > 3 || byte(7) != 0) {
    refuse(path, concat("its format is ", byte(6), ".", byte(7), "; 1.0, 2.0 and 3.0 are known"));
  }
  const std::size_t begin = byte(6) == 1 ? 10 : 12;
  if (file.size() < begin) {
    refuse(path, "it ends inside its header");
  }
  std::size_t length = byte(8) | byte(9) << 8;
  if (begin == 12) {
    length |= byte(10) << 16 | byte(11) << 24;
  }
  if (length > file.size() - begin) {
    refuse(path, concat("its header has ", length, " bytes, but the file has ", file.size()));
  }
  if (length > kMaxHeaderBytes) {
    refuse(path, concat("its header has ", length, " bytes; the limit is ", kMaxHeaderBytes));
  }
  return {begin, length};
}

// Throws if the sizes overflow. Dimensions of 0 count as 1 in the number of elements, because
// strides must not overflow.
int64_t count_bytes(const NpyHeader& header, int64_t element_bytes, const std::string& path) {
  int64_t elements = 1;
  bool is_empty = false;
  for (const int64_t size : header.shape) {
    is_empty = is_empty || size == 0;
    if (size != 0 && __builtin_mul_overflow(elements, size, &elements)) {
      refuse(path, concat("its shape ", at::IntArrayRef(header.shape),
                          " has 2^63 elements or more, if dimensions of 0 count as 1"));
    }
  }
  int64_t bytes = 0;
  if (!is_empty && __builtin_mul_overflow(elements, element_bytes, &bytes)) {
    refuse(path, concat("its shape ", at::IntArrayRef(header.shape), " has 2^63 bytes or more"));
  }
  return bytes;
}

}  // namespace

at::Tensor load_npy(const std::string& path) {
  std::string why;
  const auto mapping = detail::FileMapping::open(path, why);
  if (!mapping) {
    throw DataError(
        concat("cannot open ", path, ": ", why, "; fix: check the path and its permissions"));
  }
  const std::string_view file(reinterpret_cast<const char*>(mapping->data()), mapping->size());
  const auto [begin, length] = find_header(file, path);
  NpyHeader header = HeaderReader(file.substr(begin, length), path).read();
  const at::ScalarType dtype = dtype_of(header.descr, path);
  const auto bytes = static_cast<std::size_t>(
      count_bytes(header, static_cast<int64_t>(c10::elementSize(dtype)), path));
  const std::size_t offset = begin + length;
  if (bytes != file.size() - offset) {
    refuse(path,
           concat("its shape ", at::IntArrayRef(header.shape), " of '", header.descr, "' has ",
                  bytes, " bytes, but ", file.size() - offset, " follow the header"),
           bytes > file.size() - offset ? "copy or write the file again, it is truncated"
                                        : "save one array per file");
  }
  if (dtype == at::kBool && !detail::are_bools(mapping->data() + offset, bytes)) {
    refuse(path, "a bool has a byte other than 0 and 1");
  }
  if (!header.fortran_order) {
    return detail::tensor_over(mapping, offset, header.shape, dtype);
  }
  std::reverse(header.shape.begin(), header.shape.end());
  const at::Tensor transposed = detail::tensor_over(mapping, offset, header.shape, dtype);
  std::vector<int64_t> reversed(header.shape.size());
  for (std::size_t i = 0; i < reversed.size(); ++i) {
    reversed[i] = static_cast<int64_t>(reversed.size() - 1 - i);
  }
  return transposed.permute(reversed);
}

}  // namespace ddp
