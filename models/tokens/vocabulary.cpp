// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include "ddp/core/error.hpp"
#include "ddp/detail/utf8.hpp"
#include "models/tokens/token_dataset.hpp"
#include "tokens/token_file.hpp"
#include "tokens/token_metadata.hpp"

namespace models {
namespace {

using ddp::concat;
using ddp::Safetensors;

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

}  // namespace

std::string valid_utf8(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const size_t length = ddp::detail::first_character(text).size;
    result += length > 0 ? text.substr(0, length) : kReplacement;
    text.remove_prefix(length > 0 ? length : 1);
  }
  return result;
}

struct Vocabulary::Entries {
  explicit Entries(const std::string& path_in);

  std::string path;
  TokenizerInfo tokenizer;
  at::Tensor bytes_tensor, offsets_tensor, special_tensor;  // these own the memory below
  const char* bytes = nullptr;
  const int64_t* offsets = nullptr;
  const uint8_t* special = nullptr;
};

Vocabulary::Entries::Entries(const std::string& path_in) : path(path_in) {
  const Safetensors file = detail::open_token_safetensors(path, detail::kVocabularyFormat);
  tokenizer = detail::read_tokenizer_info(file, path);
  bytes_tensor = detail::take_vector(file, "bytes", path);
  offsets_tensor = detail::take_vector(file, "offsets", path);
  special_tensor = detail::take_vector(file, "special", path);
  if (bytes_tensor.scalar_type() != at::kByte || special_tensor.scalar_type() != at::kByte) {
    detail::refuse_token_file(path, "its tensors 'bytes' and 'special' are not both U8");
  }
  const int64_t size = tokenizer.vocab_size;
  const int64_t entries = detail::check_offsets(offsets_tensor, bytes_tensor.numel(),
                                                /*strictly=*/false, "offsets", "entry", path);
  if (entries != size || special_tensor.numel() != size) {
    detail::refuse_token_file(path,
                              concat("it has ", entries, " entries and ", special_tensor.numel(),
                                     " marks, its vocab_size is ", size));
  }
  bytes = reinterpret_cast<const char*>(bytes_tensor.const_data_ptr<uint8_t>());
  offsets = offsets_tensor.const_data_ptr<int64_t>();
  special = special_tensor.const_data_ptr<uint8_t>();
}

Vocabulary::Vocabulary(const std::string& path) : entries_(std::make_shared<Entries>(path)) {}

const std::string& Vocabulary::path() const {
  return entries_->path;
}

const TokenizerInfo& Vocabulary::tokenizer() const {
  return entries_->tokenizer;
}

std::string_view Vocabulary::bytes(int64_t id) const {
  if (id < 0 || id >= size()) {
    return kReplacement;
  }
  const int64_t* const begin = entries_->offsets + id;
  return {entries_->bytes + begin[0], static_cast<size_t>(begin[1] - begin[0])};
}

bool Vocabulary::is_special(int64_t id) const {
  return id >= 0 && id < size() && entries_->special[id] != 0;
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

void detail::require_same_vocabulary(const Vocabulary& vocabulary, const TokenFile& file) {
  const TokenizerInfo& own = vocabulary.tokenizer();
  const TokenizerInfo& other = file.tokenizer();
  if (other.identity != own.identity || other.vocab_size != own.vocab_size) {
    refuse_token_file(
        file.path(),
        concat("it was made with the vocabulary ", other.identity.substr(0, 80), " (",
               other.vocab_size, " ids), ", vocabulary.path(), " is ", own.identity.substr(0, 80),
               " (", own.vocab_size, " ids): they do not belong together"));
  }
}

}  // namespace models
