// SPDX-License-Identifier: Apache-2.0
// What this process's training loop does, as far as libddp sees: other ranks' messages show it
// while they wait for this rank. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace ddp::detail {

/// `phase` is a literal that fits "in …": "forward", "code after backward". One relaxed store. Any
/// thread.
void record_phase(const char* phase);

/// While it lives, this process waits for batch `batch` of `epoch`, both from 0.
class BatchWait {
 public:
  BatchWait(int64_t batch, int64_t epoch);
  ~BatchWait();
  BatchWait(const BatchWait&) = delete;
  BatchWait& operator=(const BatchWait&) = delete;

 private:
  uint64_t number_;
};

/// A long wait for a batch begins with it.
inline constexpr std::string_view kLoaderWait = "loader, waiting for ";

/// "loader, waiting for batch 406 of epoch 2" if the oldest wait lasts for a second, else empty.
/// Any thread.
std::string long_batch_wait();
/// The last phase; empty if none was recorded. Any thread.
std::string last_phase();

}  // namespace ddp::detail
