// SPDX-License-Identifier: Apache-2.0
#include "models/pretrained/hf_vocabulary.hpp"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <string_view>
#include <unordered_map>

#include "ddp/core/error.hpp"
#include "pretrained/json_file.hpp"

namespace models {
namespace {

using ddp::concat;
using detail::JsonObject;
using nlohmann::json;

constexpr uint64_t kMaxFileBytes = uint64_t{256} << 20;  // the largest released files have 35 MB
constexpr int64_t kMaxId = (int64_t{1} << 24) - 1;

bool contains_type(const json& part, std::initializer_list<const char*> names) {
  if (part.is_object()) {
    const auto type = part.find("type");
    if (type != part.end() && std::find(names.begin(), names.end(), *type) != names.end()) {
      return true;
    }
  }
  return part.is_structured() && std::any_of(part.begin(), part.end(), [&](const json& value) {
           return contains_type(value, names);
         });
}

// UTF-8 of a code point below U+0800.
std::string utf8(unsigned code) {
  if (code < 0x80) {
    return {static_cast<char>(code)};
  }
  return {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
}

// The printable characters that stand for bytes in byte-level BPE: printable Latin-1 is unchanged,
// the other bytes follow from U+0100 (GPT-2's bytes_to_unicode).
const std::unordered_map<std::string, char>& byte_of_character() {
  static const auto table = [] {
    std::unordered_map<std::string, char> made;
    unsigned next = 0x100;
    for (unsigned byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
      made.emplace(utf8(printable ? byte : next++), static_cast<char>(byte));
    }
    return made;
  }();
  return table;
}

std::string byte_level_bytes(const std::string& token) {
  std::string bytes;
  for (std::size_t i = 0; i < token.size();) {
    const std::size_t length = static_cast<unsigned char>(token[i]) < 0x80 ? 1 : 2;
    const auto found = byte_of_character().find(token.substr(i, length));
    if (found == byte_of_character().end()) {
      return token;  // an added word, not a byte-level one
    }
    bytes += found->second;
    i += length;
  }
  return bytes;
}

std::string sentencepiece_bytes(const std::string& token) {
  const auto digit = [&](std::size_t i) {
    return std::string_view("0123456789ABCDEF0123456789abcdef").find(token[i]);
  };
  if (token.size() == 6 && token.starts_with("<0x") && token.back() == '>' &&
      digit(3) != std::string::npos && digit(4) != std::string::npos) {
    return {static_cast<char>((digit(3) % 16) << 4 | digit(4) % 16)};
  }
  static constexpr std::string_view kSpace = "\xE2\x96\x81";  // U+2581
  std::string bytes;
  for (std::string_view rest = token; !rest.empty();) {
    const bool space = rest.starts_with(kSpace);
    bytes += space ? ' ' : rest.front();
    rest.remove_prefix(space ? kSpace.size() : 1);
  }
  return bytes;
}

using ToBytes = std::string (*)(const std::string& token);

// The conversion of the tokenizer's style, or nullptr for an unknown style.
ToBytes token_conversion(const JsonObject& file, const JsonObject& model) {
  if (model.text("type", "") == "WordPiece") {
    return [](const std::string& token) { return token; };
  }
  const auto part = [&](const char* key) { return file.has(key) ? file.json().at(key) : json(); };
  const auto used = json::array({part("decoder"), part("pre_tokenizer")});
  if (contains_type(used, {"ByteLevel"})) {
    return byte_level_bytes;
  }
  return contains_type(used, {"ByteFallback", "Metaspace", "Replace"}) ? sentencepiece_bytes
                                                                       : nullptr;
}

void put(HfVocabulary& vocabulary, const JsonObject& file, const std::string& key, const json& id,
         std::string bytes) {
  const bool valid = id.is_number_integer() && id >= 0 && id <= kMaxId;
  if (!valid) {
    file.fail(key, concat("gives a token the id ", id.dump(), ", expected 0 to ", kMaxId));
  }
  const auto index = id.get<std::size_t>();
  if (index >= vocabulary.entries.size()) {
    vocabulary.entries.resize(index + 1);
  }
  vocabulary.entries[index] = std::move(bytes);
}

void put_all(HfVocabulary& vocabulary, const JsonObject& file, const std::string& key,
             const json& tokens, ToBytes to_bytes) {
  if (tokens.is_object()) {
    for (const auto& [token, id] : tokens.items()) {
      put(vocabulary, file, key, id, to_bytes(token));
    }
    return;
  }
  if (!tokens.is_array()) {
    file.fail(key, "holds neither an object nor a list of tokens");
  }
  for (std::size_t id = 0; id < tokens.size(); ++id) {  // Unigram: [token, score]
    const auto& token = tokens[id];
    if (!token.is_array() || token.empty() || !token[0].is_string()) {
      file.fail(key, concat("has no token at ", id));
    }
    put(vocabulary, file, key, id, to_bytes(token[0].get<std::string>()));
  }
}

std::optional<HfVocabulary> read_tokenizer(const std::string& path) {
  const JsonObject file(path, kMaxFileBytes);
  const auto model = file.object("model");
  const auto to_bytes = token_conversion(file, model);
  if (to_bytes == nullptr) {
    return std::nullopt;
  }
  HfVocabulary vocabulary{.path = path, .entries = {}};
  if (!model.has("vocab")) {
    model.fail("vocab", "is missing");
  }
  put_all(vocabulary, model, "vocab", model.json().at("vocab"), to_bytes);
  const auto added = file.has("added_tokens") ? file.json().at("added_tokens") : json();
  for (const auto& token : added) {
    if (!token.is_object() || !token.contains("id") || !token.contains("content") ||
        !token.at("content").is_string()) {
      file.fail("added_tokens", "has a token without \"id\" or \"content\"");
    }
    put(vocabulary, file, "added_tokens", token.at("id"), token.at("content").get<std::string>());
  }
  return vocabulary;
}

}  // namespace

std::optional<HfVocabulary> read_hf_vocabulary(const std::string& folder) {
  std::error_code ignored;
  if (const auto path = folder + "/tokenizer.json"; std::filesystem::exists(path, ignored)) {
    return read_tokenizer(path);
  }
  const auto path = folder + "/vocab.json";
  if (!std::filesystem::exists(path, ignored)) {
    return std::nullopt;
  }
  const JsonObject file(path, kMaxFileBytes);
  HfVocabulary vocabulary{.path = path, .entries = {}};
  put_all(vocabulary, file, "", file.json(), byte_level_bytes);
  return vocabulary;
}

}  // namespace models
