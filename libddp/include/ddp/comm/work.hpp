// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <optional>

namespace ddp {

/// A collective under way. Keeps its tensors alive until waited for or destroyed after completion.
class Work {
 public:
  virtual ~Work() = default;
  /// CUDA: the caller's current *stream* waits, the host does not. CPU: the host waits. Throws what
  /// made the collective fail.
  virtual void wait() = 0;
  /// The *host* waits until the result is there. Throws PeerLostError after `timeout`.
  virtual void wait_host(std::optional<std::chrono::milliseconds> timeout = std::nullopt) = 0;
  /// Whether the result is there; never blocks.
  virtual bool is_completed() = 0;
};

using WorkPtr = std::shared_ptr<Work>;

}  // namespace ddp
