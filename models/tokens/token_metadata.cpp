// SPDX-License-Identifier: Apache-2.0
#include "tokens/token_metadata.hpp"

#include <ATen/ATen.h>

#include <charconv>
#include <limits>
#include <utility>

#include "ddp/core/error.hpp"

namespace models {
namespace {

using ddp::concat;
using ddp::DataError;
using ddp::load_safetensors;
using ddp::ReadError;
using ddp::Safetensors;

}  // namespace

std::vector<int64_t> TokenizerInfo::end_tokens() const {
  std::vector<int64_t> ids;
  for (const int64_t id : {end_of_turn, end_of_text}) {
    if (id >= 0 && (ids.empty() || ids.front() != id)) {
      ids.push_back(id);
    }
  }
  return ids;
}

namespace detail {
namespace {

constexpr int64_t kMaxVocabSize = std::numeric_limits<int32_t>::max();

const std::string* find_text(const Safetensors& file, const std::string& key) {
  const auto found = file.metadata.find(key);
  return found == file.metadata.end() ? nullptr : &found->second;
}

const std::string& take_text(const Safetensors& file, const std::string& key,
                             const std::string& path) {
  const std::string* text = find_text(file, key);
  if (text == nullptr) {
    refuse_token_file(path, "its metadata lacks '" + key + "'");
  }
  return *text;
}

int64_t take_number(const std::string& text, const std::string& key, int64_t min, int64_t max,
                    const std::string& path) {
  int64_t number = 0;
  const char* const last = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), last, number);
  if (parsed.ec != std::errc() || parsed.ptr != last || number < min || number > max) {
    refuse_token_file(path, concat("its metadata has ", key, "=", text.substr(0, 32),
                                   ", it must be from ", min, " to ", max));
  }
  return number;
}

}  // namespace

void refuse_token_file(const std::string& path, const std::string& why) {
  throw DataError(concat(path, ": ", why, kTokenFileFix));
}

Safetensors open_token_safetensors(const std::string& path, const std::string& format) {
  Safetensors file;
  try {
    file = load_safetensors(path);
  } catch (const ReadError& error) {
    throw DataError(concat(error.what(), kTokenFileFix));
  }
  const std::string* found = find_text(file, "format");
  if (found == nullptr || *found != format) {
    refuse_token_file(path, concat("its metadata has format=",
                                   found ? found->substr(0, 32) : "(none)", ", expected ", format));
  }
  const std::string version = take_text(file, "format_version", path);
  if (version != "1") {
    refuse_token_file(path, concat("its format_version is ", version.substr(0, 32),
                                   ", this program reads version 1"));
  }
  return file;
}

TokenizerInfo read_tokenizer_info(const Safetensors& file, const std::string& path) {
  TokenizerInfo info;
  info.vocab_size =
      take_number(take_text(file, "vocab_size", path), "vocab_size", 1, kMaxVocabSize, path);
  info.identity = take_text(file, "tokenizer", path);
  const std::string* name = find_text(file, "tokenizer_name");
  info.name = name ? *name : "";
  for (const auto& [key, id] :
       {std::pair("end_of_text", &info.end_of_text), std::pair("end_of_turn", &info.end_of_turn)}) {
    if (const std::string* text = find_text(file, key)) {
      *id = take_number(*text, key, 0, info.vocab_size - 1, path);
    }
  }
  return info;
}

at::Tensor take_vector(const Safetensors& file, const std::string& name, const std::string& path) {
  const auto found = file.tensors.find(name);
  if (found == file.tensors.end()) {
    refuse_token_file(path, "it has no tensor '" + name + "'");
  }
  if (found->second.dim() != 1) {
    refuse_token_file(
        path, concat("its tensor '", name, "' has ", found->second.dim(), " dimensions, not 1"));
  }
  return found->second;
}

int64_t check_offsets(const at::Tensor& offsets, int64_t total, bool strictly,
                      const std::string& name, const std::string& part, const std::string& path) {
  if (offsets.scalar_type() != at::kLong || offsets.numel() < 1) {
    refuse_token_file(path, "its tensor '" + name + "' is not I64 of at least one offset");
  }
  const auto* data = offsets.const_data_ptr<int64_t>();
  const int64_t parts = offsets.numel() - 1;
  if (data[0] != 0 || data[parts] != total) {
    refuse_token_file(path, concat("'", name, "' runs from ", data[0], " to ", data[parts],
                                   ", expected 0 to ", total));
  }
  for (int64_t i = 0; i < parts; ++i) {
    if (data[i + 1] < data[i] || (strictly && data[i + 1] == data[i])) {
      refuse_token_file(path, concat(part, " ", i, " runs from ", data[i], " to ", data[i + 1]));
    }
  }
  return parts;
}

}  // namespace detail
}  // namespace models
