// SPDX-License-Identifier: Apache-2.0
// A training run's state, copied to the host at one moment.
#pragma once

#include <c10/core/Event.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ddp/core/safetensors.hpp"
#include "ddp/core/state_dict.hpp"
#include "ddp/train/checkpoint.hpp"
#include "train/checkpoint/manifest.hpp"
#include "train/checkpoint/state_entry.hpp"

namespace ddp::detail {

/// Host memory cached between saves, by key. It is pinned for tensors on a GPU, so that copies run
/// while the host continues.
using HostBuffers = std::map<std::string, at::Tensor>;

struct SnapshotFile {
  TensorMap tensors;
  std::vector<StateEntry> entries = {};  ///< of a file of parts: what its tensors are
};

struct Snapshot {
  std::map<std::string, SnapshotFile> files;  ///< files written by this rank, by file name
  std::map<std::string, std::map<std::string, StateValue>> values;
  std::shared_ptr<c10::Event> copied;  ///< after this event the copies are complete; null on a CPU

  /// Waits for the copies. Any thread.
  void wait() const;
  /// The key of the first tensor with inf or NaN; empty if there is none. Call after wait().
  std::string first_non_finite() const;
};

/// "rank_00003.safetensors".
std::string rank_file_name(int rank);

/// Takes this rank's part: on rank 0 all replicated state, on every rank its own file and its parts
/// of divided tensors.
Snapshot take_snapshot(const std::vector<StatefulRef>& objects, int rank, at::Device device,
                       HostBuffers& buffers);

/// Loads the state into the objects, then into the generators. `files` are those of the manifest by
/// name, without other ranks' own.
/// Returns the names of saved objects that `objects` lacks. Throws MismatchError if an object is
/// not in the checkpoint or does not fit.
std::vector<std::string> restore_snapshot(const std::vector<StatefulRef>& objects,
                                          const Manifest& manifest,
                                          const std::map<std::string, Safetensors>& files, int rank,
                                          at::Device device);

}  // namespace ddp::detail
