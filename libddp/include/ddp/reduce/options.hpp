// SPDX-License-Identifier: Apache-2.0
// The settings of section ddp.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ddp/core/fields.hpp"
#include "ddp/detail/usage_mark.hpp"

namespace ddp {

/// When rank 0's buffers (BatchNorm's running statistics) are sent to the others.
enum class BroadcastBuffers {
  /// During each synchronised backward, for the next training forward. The first forward, and
  /// forwards in a join, send before they compute.
  EachForward,
  BeforeEval,  ///< when the wrapper's eval() is called
  Off,
};

/// How a bucket is reduced. None: all-reduce in the gradients' dtype. See comm_hook.hpp for hooks
/// of a program's own.
enum class CommHookType { None, AllReduce, Fp16Compress, Bf16Compress, PowerSgd };

/// What happens to gradients that are sparse tensors: those of torch::nn::Embedding and
/// EmbeddingBag with sparse(true).
enum class SparseGradients {
  Refuse,  ///< the backward throws SettingsError
  Gather,  ///< rows of all ranks are gathered; docs/semantics.md, "Sparse gradients"
};

/// What happens when replicas differ: see DdpOptions::desync_check_every.
enum class DesyncPolicy { Error, Warn, Repair };

inline constexpr NumberOrAuto kAutoBuckets = std::nullopt;  ///< ddp.bucket_cap_mb=auto

/// Names and defaults are PyTorch's; docs/configuration.md describes each setting.
struct DdpOptions {
  NumberOrAuto bucket_cap_mb = 25;  ///< kAutoBuckets: from times measured in the first backwards
  double first_bucket_mb = 0;
  bool find_unused_parameters = false;
  bool static_graph = false;
  BroadcastBuffers broadcast_buffers = BroadcastBuffers::EachForward;
  bool init_sync = true;
  bool seed_ranks = true;  ///< each rank of the communicator draws its own random numbers (dropout)
  std::vector<std::string> parameters_to_ignore{};
  CommHookType comm_hook = CommHookType::None;
  int64_t powersgd_rank = 1;
  int64_t powersgd_start_step = 1000;
  bool fp32_grads = true;
  SparseGradients sparse = SparseGradients::Refuse;
  int64_t desync_check_every = 0;  ///< steps between comparisons of the replicas; 0: never
  DesyncPolicy desync_policy = DesyncPolicy::Error;
  std::string name = "model";  ///< not a setting: names the model in messages and checkpoints
  bool logs_summary = false;   ///< not a setting, set by --summary: rank 0 logs model_summary()
  detail::UsageMark usage{};   ///< not a setting: set when a library object receives these options
};
void describe_fields(DdpOptions& options, FieldVisitor& visitor);

}  // namespace ddp
