// SPDX-License-Identifier: Apache-2.0
#include "tokens/token_file.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "ddp/core/error.hpp"
#include "ddp/detail/check.hpp"
#include "tokens/token_metadata.hpp"

namespace models::detail {
namespace {

using ddp::concat;
using ddp::Safetensors;

// Ids beyond this many tokens are not checked at opening, but when rows are made.
constexpr int64_t kCheckedAtOpening = int64_t{1} << 26;

// Plain loops, which the compiler vectorises.
template <typename T>
uint32_t largest(const T* ids, int64_t count) {
  uint32_t result = 0;
  for (int64_t i = 0; i < count; ++i) {
    result = std::max(result, static_cast<uint32_t>(ids[i]));  // a negative id becomes a large one
  }
  return result;
}

}  // namespace

TokenFile::TokenFile(const std::string& path) : path_(path) {
  const Safetensors file = open_token_safetensors(path, kTokenFileFormat);
  tokenizer_ = read_tokenizer_info(file, path);
  if (const auto name = file.metadata.find("name"); name != file.metadata.end()) {
    name_ = name->second;
  }
  tokens_tensor_ = take_vector(file, "tokens", path);
  num_tokens_ = tokens_tensor_.numel();
  if (tokens_tensor_.scalar_type() == at::kUInt16) {
    tokens16_ = tokens_tensor_.const_data_ptr<uint16_t>();
  } else if (tokens_tensor_.scalar_type() == at::kInt) {
    tokens32_ = tokens_tensor_.const_data_ptr<int32_t>();
  } else {
    refuse_token_file(
        path, concat("its tensor 'tokens' is ", tokens_tensor_.scalar_type(), ", not U16 or I32"));
  }
  documents_tensor_ = take_vector(file, "documents", path);
  num_documents_ = check_offsets(documents_tensor_, num_tokens_, /*strictly=*/true, "documents",
                                 "document", path);
  documents_ = documents_tensor_.const_data_ptr<int64_t>();
  if (num_documents_ == 0) {
    refuse_token_file(path, "it holds no document");
  }
  if (file.tensors.contains("targets")) {
    targets_tensor_ = take_vector(file, "targets", path);
    if (targets_tensor_.scalar_type() != at::kByte || targets_tensor_.numel() != num_tokens_) {
      refuse_token_file(path, concat("its tensor 'targets' is not U8 of ", num_tokens_, " tokens"));
    }
    targets_ = targets_tensor_.const_data_ptr<uint8_t>();
  }
  const int64_t num_checked = std::min(num_tokens_, kCheckedAtOpening);
  check_ids(0, num_checked);
  num_checked_ = num_checked;
}

int64_t TokenFile::document_of(int64_t token) const {
  return std::upper_bound(documents_, documents_ + num_documents_, token) - documents_ - 1;
}

void TokenFile::fail_id(int64_t token, int64_t id) const {
  const int64_t document = document_of(token);
  refuse_token_file(
      path_,
      concat("document ", document, " has id ", id, " at token ", token - documents_[document],
             " (", token, " of the file), its vocabulary ends at ", tokenizer_.vocab_size - 1));
}

void TokenFile::check_ids(int64_t begin, int64_t count) const {
  const auto limit = static_cast<uint32_t>(tokenizer_.vocab_size);
  const auto check = [&](const auto* ids) {
    if (largest(ids, count) >= limit) {
      const auto* bad = std::find_if(ids, ids + count,
                                     [&](auto id) { return static_cast<uint32_t>(id) >= limit; });
      fail_id(begin + (bad - ids), *bad);
    }
  };
  tokens16_ != nullptr ? check(tokens16_ + begin) : check(tokens32_ + begin);
}

void TokenFile::copy_tokens(int64_t begin, int64_t count, int32_t* out) const {
  DDP_CHECK(begin >= 0 && count >= 0 && begin + count <= num_tokens_, begin, " + ", count);
  if (begin + count > num_checked_) {
    check_ids(begin, count);
  }
  if (tokens16_ != nullptr) {
    std::copy_n(tokens16_ + begin, count, out);
  } else {
    std::copy_n(tokens32_ + begin, count, out);
  }
}

int64_t TokenFile::count_targets(int64_t begin, int64_t count) const {
  if (targets_ == nullptr) {
    return count;
  }
  int64_t targets = 0;
  for (int64_t i = begin; i < begin + count; ++i) {
    targets += targets_[i] != 0 ? 1 : 0;
  }
  return targets;
}

std::vector<PromptReference> TokenFile::prompt_references(int64_t document) const {
  DDP_CHECK(document >= 0 && document < num_documents_, document);
  std::vector<PromptReference> result;
  if (targets_ == nullptr) {
    return result;
  }
  const int64_t begin = documents_[document];
  const uint8_t* const limit = targets_ + documents_[document + 1];
  const auto is_set = [](uint8_t mark) { return mark != 0; };
  const auto ids = [this](int64_t from, int64_t to) {
    std::vector<int32_t> narrow(static_cast<size_t>(to - from));
    copy_tokens(from, to - from, narrow.data());
    return std::vector<int64_t>(narrow.begin(), narrow.end());
  };
  int64_t answer = 0;
  const uint8_t* end = targets_ + begin;
  while (true) {
    const uint8_t* const first = std::find_if(end, limit, is_set);
    if (first == limit) {
      return result;
    }
    end = std::find_if_not(first, limit, is_set);
    if (first != targets_ + begin) {
      result.push_back({.document = document,
                        .answer = answer,
                        .prompt = ids(begin, first - targets_),
                        .reference = ids(first - targets_, end - targets_)});
    }
    ++answer;
  }
}

}  // namespace models::detail
