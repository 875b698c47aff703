// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace ddp {

class DataParallelModel;

/// See DataParallelModel::no_sync().
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(DataParallelModel& model);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  DataParallelModel& model_;
  bool previous_;
};

}  // namespace ddp
