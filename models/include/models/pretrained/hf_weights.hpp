// SPDX-License-Identifier: Apache-2.0
// Weights in Hugging Face's layout: model.safetensors, or model.safetensors.index.json and its
// shards.
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "ddp/comm/communicator.hpp"
#include "ddp/train/weights.hpp"
#include "models/pretrained/hf_config.hpp"

namespace models {

/// How weights get from the files into the module.
enum class WeightRoute {
  Auto,    ///< Shared on CUDA, Mapped elsewhere
  Mapped,  ///< each rank copies from the mapped files
  Shared,  ///< each rank reads a part through page-locked memory, then all-gather
};

/// Options of load_pretrained().
struct PretrainedLoadOptions {
  bool strict = true;                     ///< every key must fit; false: load the keys that fit
  WeightRoute route = WeightRoute::Auto;  ///< equal on all ranks
  int64_t num_threads = 0;                ///< reading threads per rank; 0: cores / ranks, 1 to 8
  int64_t chunk_mb = 256;  ///< Shared: data between two all-gathers; the device holds twice this
};

/// Result of load_pretrained().
struct PretrainedLoad {
  ddp::WeightDifferences differences;  ///< empty if strict
  int64_t num_bytes = 0;               ///< size of the weights in the files, over all ranks
  double seconds = 0;                  ///< on this rank, until the weights are in the module
};

/// Loads weights into `module`, cast to its dtypes, on its device. `path` is a folder with
/// model.safetensors (or else model.safetensors.index.json), or one of these files. The module's
/// own names are Hugging Face's. As in transformers:
/// - a file without the prefix "transformer." or "model." (of the base model alone) fits too;
/// - buffers of older releases (attn.bias and attn.masked_bias of GPT-2, rotary_emb.inv_freq) are
///   ignored;
/// - if the module ties its head to its embedding, the file may hold either or both, if equal.
/// Adapters (lora_A, lora_B) are not loaded and keep their values.
///
/// With a communicator the call is collective, and its ranks share the reading (Shared). The
/// communicator should join ranks that read the files equally fast: those of one node,
/// Context::communicator().split(node_rank, local_rank), or all ranks on a fast shared file system.
/// A failure on one rank, or different files on two ranks, is an error on all ranks. nullptr: this
/// rank alone.
///
/// Throws ddp::ReadError naming file and tensor for a missing or truncated file, a header too
/// large, or overlapping offsets. The same holds for a tensor that its shard lacks, and for weights
/// other than float32, bfloat16 and float16. Throws ddp::MismatchError listing all missing,
/// unexpected and wrongly shaped keys; wrong shapes are errors also without strict. The module is
/// unchanged after these errors. An error while reading data may leave a part loaded. LibTorch's
/// own errors become a ReadError with their first sentence.
PretrainedLoad load_pretrained(torch::nn::Module& module, const std::string& path,
                               ddp::Communicator* communicator = nullptr,
                               const PretrainedLoadOptions& options = {});

/// Contents of text files by name.
using ModelFiles = std::map<std::string, std::string>;

/// Reads the files of a Hugging Face folder other than weights: config.json, generation_config.json
/// and the tokenizer's files, if present. Throws ddp::ReadError if one cannot be read.
ModelFiles read_model_files(const std::string& folder);
/// Reads the tokenizer's files alone: tokenizer.json, tokenizer_config.json and similar.
ModelFiles read_tokenizer_files(const std::string& folder);

/// Options of save_pretrained().
struct PretrainedSaveOptions {
  int64_t max_shard_bytes = 5'000'000'000;  ///< transformers' limit; a larger tensor is a shard
  std::optional<at::ScalarType> dtype{};    ///< dtype of all weights; unset: unchanged
  /// Files to write next to the weights. A config.json among them replaces the call's `config`,
  /// except for the dtype: keys unknown here survive.
  ModelFiles files{};
  /// Replaces an older model in the folder, atomically if the file system can. Its weights and the
  /// rewritten files go; all other files stay.
  bool replace = false;
};

/// Creates `folder` with config.json (`config` with the saved dtype) and the weights of `module`,
/// for transformers' from_pretrained. All or nothing: the files are written to a temporary folder,
/// then renamed. Call it on one rank. Throws ddp::SettingsError if `folder` is not a folder or not
/// empty (unless options.replace), ddp::WriteError, and std::invalid_argument for a module with
/// adapters (merge them first).
void save_pretrained(const torch::nn::Module& module, const HfConfig& config,
                     const std::string& folder, const PretrainedSaveOptions& options = {});

/// Returns the name of a file, folder or link in `folder` that neither save_pretrained() nor
/// save_adapter() writes. Returns nullopt if there is none or no such folder.
std::optional<std::string> find_other_file(const std::string& folder);

/// Gives `folder` its name back if a killed process left it as ".NAME.old-…" in the same parent
/// folder. This happens only if no file system call exchanges two names (NFS).
void restore_replaced(const std::string& folder);

/// For the only program that saves to `folder`. Calls restore_replaced(), then removes leftovers of
/// killed saves (".NAME.tmp-…", ".NAME.old-…"). Files in them that saving does not write move to
/// `folder`.
void finish_interrupted_save(const std::string& folder);

}  // namespace models
