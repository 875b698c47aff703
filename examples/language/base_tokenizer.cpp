// SPDX-License-Identifier: Apache-2.0
#include "language/base_tokenizer.hpp"

#include <algorithm>
#include <filesystem>
#include <string_view>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/detail/utf8.hpp"
#include "models/pretrained/hf_vocabulary.hpp"

namespace examples {
namespace {

using ddp::concat;

std::string shown(std::string_view bytes) {
  constexpr std::size_t kLongest = 40;
  const auto text = ddp::detail::printable_line(models::valid_utf8(bytes.substr(0, kLongest)));
  return "'" + text + (bytes.size() > kLongest ? "…'" : "'");
}

/// Ids with one kind of difference.
struct Differences {
  int64_t count = 0;
  int64_t first = -1;
  void add(int64_t id) { first = count++ == 0 ? id : first; }
};

std::string description(const Differences& ids, const models::Vocabulary& data,
                        const models::HfVocabulary& base) {
  const auto i = static_cast<std::size_t>(ids.first);
  return concat(
      ids.count, ids.count == 1 ? " id, " : " ids, the first ", ids.first, ", which is ",
      shown(data.bytes(ids.first)), " in ", data.path(), " and ",
      i < base.entries.size() && !base.entries[i].empty() ? shown(base.entries[i]) : "nothing",
      " in ", base.path);
}

TokenizerComparison compare(const models::Vocabulary& data, const models::HfVocabulary& base,
                            const std::string& folder) {
  Differences plain, special, lacking;
  for (int64_t id = 0; id < data.size(); ++id) {
    const auto bytes = data.bytes(id);
    const auto i = static_cast<std::size_t>(id);
    const bool known = i < base.entries.size() && !base.entries[i].empty();
    if (bytes.empty() || (known && bytes == base.entries[i])) {
      continue;
    }
    (!known ? lacking : data.is_special(id) ? special : plain).add(id);
  }
  TokenizerComparison result;
  if (plain.count > 0) {
    result.refusal =
        concat("tokens.path was not prepared with the tokenizer of model.path: they differ in ",
               description(plain, data, base), "; fix: prepare the data with --tokenizer ", folder,
               " (or use a copy of the model without its tokenizer if other ids are intended)");
  } else if (lacking.count + special.count > 0) {
    result.warning = concat("tokens.path has tokens that the tokenizer of model.path does not: ",
                            description(special.count > 0 ? special : lacking, data, base),
                            "; the model has not learned their meaning");
  }
  return result;
}

}  // namespace

TokenizerComparison compare_tokenizers(const models::TokenDataset& data, const std::string& base) {
  const auto unknown = [&](const std::string& why) {
    return TokenizerComparison{
        .refusal = "",
        .warning =
            concat("it is unknown whether ", data.path(), " (tokenizer '", data.tokenizer().name,
                   "') was prepared with the tokenizer of ", base, ": ", why)};
  };
  const auto vocabulary = models::read_hf_vocabulary(base);
  if (!vocabulary) {
    return unknown("this folder has no tokenizer.json that can be compared");
  }
  std::error_code ignored;
  const auto& path = data.options().path;
  if (!std::filesystem::exists(path + "/vocabulary.safetensors", ignored)) {
    return unknown(path + " has no vocabulary.safetensors");
  }
  return compare(data.vocabulary(), *vocabulary, base);
}

void require_base_tokenizer(const models::TokenDataset& data, const LanguageModelSettings& model) {
  if (model.init != "pretrained" || model.path.empty()) {
    return;
  }
  const auto result = compare_tokenizers(data, model.path);
  if (!result.refusal.empty()) {
    throw ddp::DataError(result.refusal);
  }
  if (!result.warning.empty()) {
    ddp::log_warning(result.warning);
  }
}

}  // namespace examples
