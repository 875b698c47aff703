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

/// How weights come from the files to the module.
enum class WeightRoute {
  Auto,    ///< Shared on CUDA, Mapped elsewhere
  Mapped,  ///< each rank copies out of the mapped files
  Shared,  ///< each rank of the group reads a part, through page-locked memory; then all-gather
};

struct PretrainedLoadOptions {
  bool strict = true;  ///< every key must fit; false: those that fit are loaded
  WeightRoute route = WeightRoute::Auto;
  int64_t num_threads = 0;  ///< that read, on each rank; 0: cores / ranks, 1 to 8
  int64_t chunk_mb = 256;   ///< Shared: data between two all-gathers; twice this on the device
};

struct PretrainedLoad {
  ddp::WeightDifferences differences;
  int64_t num_bytes = 0;  ///< of the weights in the files, all ranks together
  double seconds = 0;     ///< on this rank, until the weights are in the module
};

/// Loads weights into `module`, cast to its dtypes, on its device. `path` is a folder with
/// model.safetensors (or else model.safetensors.index.json), or one of these files. The module's
/// own names are Hugging Face's; as in transformers
/// - a file without the prefix "transformer." or "model." (of the base model alone) fits too;
/// - buffers of older releases (attn.bias and attn.masked_bias of GPT-2, rotary_emb.inv_freq) are
///   passed over;
/// - where the module ties its head to its embedding the file may hold either or both, if equal.
/// Adapters (lora_A, lora_B) are no part of it: they stay as they are.
///
/// With a communicator the call is collective: its ranks share the reading (Shared), so it should
/// join the ranks that see the files equally fast: those of a node, Context::communicator()
/// .split(node_rank, local_rank), or all with a fast shared file system. A failure on one rank is
/// an error on all, and so are files that differ between ranks. nullptr: alone.
///
/// Throws ddp::ReadError naming file and tensor (missing file or shard, truncated, a header too
/// large, offsets that overlap, a tensor that the index names and its shard lacks, weights other
/// than float32, bfloat16 and float16); ddp::MismatchError with the names of all missing,
/// unexpected and wrongly shaped keys, wrong shapes also where not strict. Up to then nothing was
/// changed; an error of reading data may leave a part loaded. What LibTorch itself throws meanwhile
/// is a ReadError with its first sentence.
PretrainedLoad load_pretrained(torch::nn::Module& module, const std::string& path,
                               ddp::Communicator* communicator = nullptr,
                               const PretrainedLoadOptions& options = {});

/// The text of files by name.
using ModelFiles = std::map<std::string, std::string>;

/// What a Hugging Face folder holds beside its weights: config.json, generation_config.json and the
/// tokenizer's files, those that are there. Throws ddp::ReadError where one cannot be read.
ModelFiles read_model_files(const std::string& folder);
/// The tokenizer's alone: tokenizer.json, tokenizer_config.json and their kind.
ModelFiles read_tokenizer_files(const std::string& folder);

struct PretrainedSaveOptions {
  int64_t max_shard_bytes = 5'000'000'000;  ///< transformers' limit; a larger tensor is a shard
  std::optional<at::ScalarType> dtype{};    ///< of all weights; unset: as they are
  /// Beside the weights. A config.json among them counts instead of what the call says, but for
  /// its dtype: keys unknown here survive.
  ModelFiles files{};
  /// An older model in the folder is replaced, at once where the file system can: its weights go,
  /// and the files that are written again; whatever else lies there stays.
  bool replace = false;
};

/// Makes `folder` with config.json (`config`, its dtype set to what is saved) and the weights of
/// `module`, which transformers' from_pretrained loads. All or nothing: written beside it and
/// renamed. On one rank. Throws ddp::SettingsError where `folder` is there and not empty (unless
/// options.replace) or no folder,
/// ddp::WriteError, and std::invalid_argument for a module with adapters (merge them first).
void save_pretrained(const torch::nn::Module& module, const HfConfig& config,
                     const std::string& folder, const PretrainedSaveOptions& options = {});

/// A file or folder in `folder` that neither save_pretrained() nor save_adapter() writes, by its
/// name; a link is one. Nothing where there is none, or no such folder.
std::optional<std::string> find_other_file(const std::string& folder);

/// Where no file system call exchanges two names (NFS), a process killed while it replaced `folder`
/// may have left it under the name ".NAME.old-…" beside it: gives it its name back.
void restore_replaced(const std::string& folder);

/// For a program that saves to `folder` again and again, and alone: restore_replaced(), then
/// removes what killed saves left beside it (".NAME.tmp-…", ".NAME.old-…"). A file in there that
/// saving does not write moves to `folder`.
void finish_interrupted_save(const std::string& folder);

}  // namespace models
