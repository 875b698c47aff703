// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include "data/token_metadata.hpp"
#include "ddp/core/error.hpp"
#include "ddp/data/token_dataset.hpp"

namespace ddp {

namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// Length in bytes of the UTF-8 character at the start of `text`; 0 if there is none. The Unicode
// Standard, table 3-7.
size_t character_bytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) {
    return 1;
  }
  const size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < length) {
    return 0;
  }
  const unsigned low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const unsigned high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  if (byte(1) < low || byte(1) > high) {
    return 0;
  }
  for (size_t i = 2; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) {
      return 0;
    }
  }
  return length;
}

}  // namespace

std::string valid_utf8(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const size_t length = character_bytes(text);
    result += length > 0 ? text.substr(0, length) : kReplacement;
    text.remove_prefix(length > 0 ? length : 1);
  }
  return result;
}

Vocabulary::Vocabulary(const std::string& path) : path_(path) {
  const Safetensors file = detail::open_token_safetensors(path, detail::kVocabularyFormat);
  tokenizer_ = detail::read_tokenizer_info(file, path);
  bytes_tensor_ = detail::take_vector(file, "bytes", path);
  offsets_tensor_ = detail::take_vector(file, "offsets", path);
  special_tensor_ = detail::take_vector(file, "special", path);
  if (bytes_tensor_.scalar_type() != at::kByte || special_tensor_.scalar_type() != at::kByte) {
    detail::refuse_token_file(path, "its tensors 'bytes' and 'special' are not both U8");
  }
  const int64_t entries = detail::check_offsets(offsets_tensor_, bytes_tensor_.numel(),
                                                /*strictly=*/false, "offsets", "entry", path);
  if (entries != size() || special_tensor_.numel() != size()) {
    detail::refuse_token_file(path,
                              concat("it has ", entries, " entries and ", special_tensor_.numel(),
                                     " marks, its vocab_size is ", size()));
  }
  bytes_ = reinterpret_cast<const char*>(bytes_tensor_.const_data_ptr<uint8_t>());
  offsets_ = offsets_tensor_.const_data_ptr<int64_t>();
  special_ = special_tensor_.const_data_ptr<uint8_t>();
}

std::string_view Vocabulary::bytes(int64_t id) const {
  if (id < 0 || id >= size()) {
    return kReplacement;
  }
  return {bytes_ + offsets_[id], static_cast<size_t>(offsets_[id + 1] - offsets_[id])};
}

bool Vocabulary::is_special(int64_t id) const {
  return id >= 0 && id < size() && special_[id] != 0;
}

std::optional<int64_t> Vocabulary::find(std::string_view text) const {
  for (int64_t id = 0; id < size(); ++id) {
    if (bytes(id) == text) {
      return id;
    }
  }
  return std::nullopt;
}

std::string Vocabulary::decode(const std::vector<int64_t>& ids, bool skip_special) const {
  std::string text;
  for (const int64_t id : ids) {
    if (!skip_special || !is_special(id)) {
      text += bytes(id);
    }
  }
  return text;
}

void Vocabulary::require_same(const TokenFile& file) const {
  const TokenizerInfo& other = file.tokenizer();
  if (other.identity != tokenizer_.identity || other.vocab_size != tokenizer_.vocab_size) {
    detail::refuse_token_file(
        file.path(),
        concat("it was made with the vocabulary ", other.identity.substr(0, 80), " (",
               other.vocab_size, " ids), ", path_, " is ", tokenizer_.identity.substr(0, 80), " (",
               size(), " ids): they do not belong together"));
  }
}

}  // namespace ddp
