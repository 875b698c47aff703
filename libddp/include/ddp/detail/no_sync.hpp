// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

namespace ddp {

class DataParallelModel;

/// See DataParallelModel::no_sync(). It may be moved, and kept in a std::optional. The
/// model outlives it.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(DataParallelModel& model);

 private:
  struct Leave {
    void operator()(int* depth) const { --*depth; }
  };
  std::unique_ptr<int, Leave> depth_;  ///< the model's number of living NoSyncs
};

}  // namespace ddp
