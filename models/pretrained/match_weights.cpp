// SPDX-License-Identifier: Apache-2.0
// Matches the names in files with names of modules, with the exceptions that transformers makes.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <string_view>

#include "ddp/core/error.hpp"
#include "pretrained/positioned_file.hpp"
#include "pretrained/stored_weights.hpp"

namespace models::detail {
namespace {

using ddp::concat;

/// A name that a file may use for another parameter's memory.
struct TiedName {
  const char* tied;
  const char* own;
};
constexpr TiedName kTiedNames[] = {
    {"lm_head.weight", "model.embed_tokens.weight"},
    {"lm_head.weight", "transformer.wte.weight"},
    {"cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"},
    {"cls.predictions.decoder.bias", "cls.predictions.bias"}};
constexpr const char* kPrefixes[] = {"transformer.", "model.", "bert."};
constexpr const char* kBertTable = "bert.embeddings.word_embeddings.weight";

/// Parts of a BERT file that its masked-language head does not use: the pooler, the next-sentence
/// head, and the position numbers that older releases stored.
bool is_other_bert_head(const std::string& name) {
  return name.starts_with("bert.pooler.") || name.starts_with("pooler.") ||
         name.starts_with("cls.seq_relationship.") || name.ends_with("embeddings.position_ids");
}

/// The first BERT releases call weight and bias of a LayerNorm gamma and beta.
std::string with_norm_names(const std::string& name) {
  for (const auto& [old, now] :
       {std::pair{"LayerNorm.gamma", "weight"}, {"LayerNorm.beta", "bias"}}) {
    if (name.ends_with(old)) {
      return name.substr(0, name.rfind('.') + 1) + now;
    }
  }
  return name;
}

bool is_adapter(const std::string& name) {
  return name.ends_with(".lora_A.weight") || name.ends_with(".lora_B.weight");
}

// Masks and wavelengths that older releases stored as buffers.
bool is_old_buffer(const std::string& name) {
  for (const std::string_view ending : {".attn.bias", ".attn.masked_bias"}) {
    if (name.ends_with(ending)) {  // preceded by h.<number>
      const std::string before = name.substr(0, name.size() - ending.size());
      const auto digits = before.find_last_not_of("0123456789");
      return digits != std::string::npos && digits + 1 < before.size() &&
             (before.substr(0, digits + 1) == "h." ||
              before.substr(0, digits + 1).ends_with(".h."));
    }
  }
  return name.ends_with(".rotary_emb.inv_freq");
}

std::string module_name(const std::string& stored, const ddp::TensorMap& module) {
  const std::string name = with_norm_names(stored);
  if (module.count(name) == 0) {
    for (const char* prefix : kPrefixes) {
      if (module.count(prefix + name) != 0) {
        return prefix + name;
      }
    }
  }
  return name;
}

bool same_bytes(const StoredWeights& stored, const StoredTensor& a, const StoredTensor& b) {
  if (a.dtype != b.dtype || a.shape != b.shape) {
    return false;
  }
  const PositionedFile file_a(stored.files[a.file]);
  const PositionedFile file_b(stored.files[b.file]);
  constexpr uint64_t kBlock = 4 << 20;
  std::string bytes_a(kBlock, '\0');
  std::string bytes_b(kBlock, '\0');
  for (uint64_t at = 0; at < a.num_bytes; at += kBlock) {
    const uint64_t count = std::min(kBlock, a.num_bytes - at);
    file_a.read(a.offset + at, bytes_a.data(), count);
    file_b.read(b.offset + at, bytes_b.data(), count);
    if (std::memcmp(bytes_a.data(), bytes_b.data(), count) != 0) {
      return false;
    }
  }
  return true;
}

// A file may hold the tied name of a parameter, with or without the parameter's own.
void resolve_tied_names(const StoredWeights& stored, const ddp::TensorMap& module,
                        MatchedWeights& weights) {
  for (const auto& [tied, own] : kTiedNames) {
    const auto found = weights.find(tied);
    if (found == weights.end() || module.count(tied) != 0 || module.count(own) == 0) {
      continue;
    }
    const auto [other, added] = weights.emplace(own, found->second);
    if (!added && !same_bytes(stored, *other->second, *found->second)) {
      throw ddp::MismatchError(concat(stored.source, ": ", tied, " differs from ", own,
                                      ", but this model ties them (tie_word_embeddings)"));
    }
    weights.erase(tied);
  }
}

}  // namespace

at::ScalarType weight_dtype(const StoredTensor& tensor) {
  return tensor.dtype == "F32" ? at::kFloat : tensor.dtype == "F16" ? at::kHalf : at::kBFloat16;
}

WeightMatch match_weights(const StoredWeights& stored, const ddp::TensorMap& module) {
  WeightMatch match;
  const bool is_bert = module.count(kBertTable) != 0;
  for (const auto& tensor : stored.tensors) {
    const std::string name = module_name(tensor.name, module);
    if (module.count(name) == 0 && (is_old_buffer(name) || (is_bert && is_other_bert_head(name)))) {
      continue;
    }
    if (tensor.dtype != "F32" && tensor.dtype != "BF16" && tensor.dtype != "F16") {
      throw ddp::ReadError(stored.files[tensor.file] + ": the tensor '" + tensor.name +
                           "' is of dtype " + tensor.dtype +
                           "; weights are F32, BF16 or F16 (quantized ones are not supported)");
    }
    if (const auto [other, added] = match.weights.emplace(name, &tensor); !added) {
      throw ddp::ReadError(stored.source + " holds '" + name + "' twice: as '" +
                           other->second->name + "' and as '" + tensor.name + "'");
    }
  }
  resolve_tied_names(stored, module, match.weights);
  ddp::TensorMap expected;
  for (const auto& [name, tensor] : module) {
    if (!is_adapter(name)) {
      expected.emplace(name, tensor);
    }
  }
  ddp::TensorMap shapes;
  for (const auto& [name, tensor] : match.weights) {
    shapes.emplace(name, at::empty(tensor->shape, at::TensorOptions().device(at::kMeta)));
  }
  match.differences = ddp::compare_weights(expected, shapes);
  std::erase_if(match.weights, [&](const auto& item) { return expected.count(item.first) == 0; });
  return match;
}

}  // namespace models::detail
