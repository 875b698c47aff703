// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <optional>

namespace ddp {

/// A pending collective. Keeps its tensors alive until waited for or destroyed after completion.
class Work {
 public:
  virtual ~Work() = default;
  /// CUDA: the caller's current *stream* waits, the host does not. CPU: the host waits. Rethrows
  /// the collective's error.
  virtual void wait() = 0;
  /// The *host* waits for the result. Throws PeerLostError after `timeout`.
  virtual void wait_host(std::optional<std::chrono::milliseconds> timeout = std::nullopt) = 0;
  /// Whether the result is ready; never blocks.
  virtual bool is_completed() = 0;
};

using WorkPtr = std::shared_ptr<Work>;

}  // namespace ddp
