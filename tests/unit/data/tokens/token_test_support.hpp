// SPDX-License-Identifier: Apache-2.0
// Token files written by the tests.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ddp/core/safetensors.hpp"
#include "models/tokens/token_dataset.hpp"
#include "unit/data/data_test_support.hpp"

namespace token_test {

using Documents = std::vector<std::vector<int32_t>>;

/// The parts of a token file, which a test may change before writing.
struct TokenParts {
  at::Tensor tokens;
  at::Tensor documents;
  at::Tensor targets;  ///< undefined: omitted
  std::map<std::string, std::string> metadata{{"format", "ddp_tokens"},   {"format_version", "1"},
                                              {"vocab_size", "1000"},     {"tokenizer", "sha256:a"},
                                              {"tokenizer_name", "tiny"}, {"name", "by hand"},
                                              {"end_of_text", "2"},       {"end_of_turn", "1"}};

  void write(const std::string& path) const {
    ddp::TensorMap tensors{{"tokens", tokens}, {"documents", documents}};
    if (targets.defined()) {
      tensors["targets"] = targets;
    }
    ddp::save_safetensors(path, tensors, metadata);
  }
};

/// `targets` marks tokens of each document; without it, the file has no marks.
inline TokenParts make_parts(const Documents& documents,
                             const std::optional<Documents>& targets = std::nullopt,
                             at::ScalarType dtype = at::kUInt16) {
  std::vector<int64_t> offsets{0};
  std::vector<int32_t> all;
  for (const auto& document : documents) {
    all.insert(all.end(), document.begin(), document.end());
    offsets.push_back(static_cast<int64_t>(all.size()));
  }
  TokenParts parts;
  parts.tokens = at::tensor(all, at::kInt).to(dtype);
  parts.documents = at::tensor(offsets, at::kLong);
  if (targets) {
    std::vector<int32_t> marks;
    for (const auto& document : *targets) {
      marks.insert(marks.end(), document.begin(), document.end());
    }
    parts.targets = at::tensor(marks, at::kInt).to(at::kByte);
  }
  return parts;
}

/// Documents of the given lengths with distinct ids: id = 10 + position in the text.
inline Documents numbered(const std::vector<int64_t>& lengths) {
  Documents documents;
  int32_t id = 10;
  for (const int64_t length : lengths) {
    documents.emplace_back();
    for (int64_t i = 0; i < length; ++i) {
      documents.back().push_back(id++);
    }
  }
  return documents;
}

/// Marks every token of each document except its first `prompt` ones.
inline Documents answers_after(const Documents& documents, size_t prompt) {
  Documents marks;
  for (const auto& document : documents) {
    marks.emplace_back(document.size(), 1);
    std::fill_n(marks.back().begin(), std::min(prompt, document.size()), 0);
  }
  return marks;
}

/// The targets of an epoch over the documents, ascending: each document's tokens after its first
/// `prompt` ones. A document's first token is never a target, because nothing predicts it.
inline std::vector<int32_t> targets_of(const Documents& documents, size_t prompt) {
  std::vector<int32_t> targets;
  for (const auto& document : documents) {
    for (size_t i = std::max<size_t>(prompt, 1); i < document.size(); ++i) {
      targets.push_back(document[i]);
    }
  }
  std::sort(targets.begin(), targets.end());
  return targets;
}

inline models::TokenDataOptions token_options(
    models::TokenLayout layout, int64_t max_seq_len,
    models::LongDocuments policy = models::LongDocuments::Truncate) {
  models::TokenDataOptions options;
  options.layout = layout;
  options.max_seq_len = max_seq_len;
  options.long_documents = policy;
  return options;
}

/// A folder with both splits.
class TokenFolder {
 public:
  explicit TokenFolder(const TokenParts& parts) {
    parts.write(file("train.safetensors"));
    parts.write(file("eval.safetensors"));
  }
  models::TokenDataset open(models::TokenDataOptions options,
                            ddp::Split split = ddp::Split::Train) const {
    options.path = path();
    return models::TokenDataset(options, split);
  }
  std::string file(const std::string& name) const { return (folder_.path() / name).string(); }
  std::string path() const { return folder_.path().string(); }

 private:
  data_test::TempFolder folder_;
};

}  // namespace token_test
