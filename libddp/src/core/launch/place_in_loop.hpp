// SPDX-License-Identifier: Apache-2.0
// What this process's training loop does, as far as libddp sees: other ranks' messages show it
// while they wait for this rank. Torch-free.
#pragma once

#include <cstdint>
#include <string>

namespace ddp::detail {

/// `phase` is a literal: "forward", "backward". One relaxed store. Any thread.
void record_phase(const char* phase);

/// While it lives, this process waits for batch `batch` of `epoch`, both from 0.
class BatchWait {
 public:
  BatchWait(int64_t batch, int64_t epoch);
  ~BatchWait();
  BatchWait(const BatchWait&) = delete;
  BatchWait& operator=(const BatchWait&) = delete;
};

/// "loader, waiting for batch 406 of epoch 2" if such a wait lasts for a second, else empty. Any
/// thread.
std::string long_batch_wait();
/// The last phase; empty if none was recorded. Any thread.
std::string last_phase();

}  // namespace ddp::detail
