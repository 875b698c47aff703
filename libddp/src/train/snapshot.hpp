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
#include "train/manifest.hpp"

namespace ddp::detail {

/// Host memory that is kept from save to save; pinned where the tensors lie on a GPU, so that
/// copies run while the host goes on.
class HostBuffers {
 public:
  /// A contiguous host copy of `tensor` under `key`, enqueued on the current stream.
  at::Tensor copy(const std::string& key, const at::Tensor& tensor);

 private:
  std::map<std::string, at::Tensor> buffers_;
};

struct Snapshot {
  std::map<std::string, TensorMap> files;  ///< by file name; what this rank writes
  std::map<std::string, std::map<std::string, StateValue>> values;
  std::map<std::string, std::string> leaf_dtypes;
  std::vector<std::shared_ptr<c10::Event>> copied;  ///< the host copies are there after these

  /// Waits for the copies; any thread.
  void wait() const;
  /// The key of the first tensor with inf or NaN; empty: there is none. After wait().
  std::string first_non_finite() const;
};

/// "rank_00003.safetensors".
std::string rank_file_name(int rank);

/// Takes this rank's part: rank 0 everything replicated, every rank its own file.
Snapshot take_snapshot(const std::vector<StatefulRef>& objects, int rank, at::Device device,
                       HostBuffers& buffers);

/// Gives the state back to the objects, then to the generators. `files` maps file names to tensors.
/// Throws MismatchError where an object is not in the checkpoint or does not fit.
void restore_snapshot(const std::vector<StatefulRef>& objects, const Manifest& manifest,
                      const std::map<std::string, TensorMap>& files, int rank, at::Device device,
                      const std::string& checkpoint);

}  // namespace ddp::detail
