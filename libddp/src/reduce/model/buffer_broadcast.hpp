// SPDX-License-Identifier: Apache-2.0
// Sends one rank's buffers to the others during a backward, which does not read them:
//
//   compute stream | forward | backward ...                      | end: waits, usually done
//   own stream               | gather | broadcast | write |
//
// On the CPU the broadcast runs in the communicator's thread, and finish() writes the buffers.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>
#include <vector>

#include "ddp/comm/communicator.hpp"

namespace ddp::detail {

class BufferBroadcast {
 public:
  explicit BufferBroadcast(CommunicatorPtr communicator) : communicator_(std::move(communicator)) {}

  /// Collective. `buffers` keep their memory until finish(). Until then, writes to them are lost
  /// and reads may give either value.
  void start(const std::vector<at::Tensor>& buffers, int root);
  /// Makes the current stream (on the CPU: the host) wait until the buffers are written. Does
  /// nothing if none were sent.
  void finish();
  /// Waits like finish(). Returns whether start() was called since the last call.
  bool take_sent();

  /// Decides whether the next training forward must first receive rank 0's buffers, in a model that
  /// has any.
  struct State {
    bool is_required = true;  ///< the last training forward was synchronised
    bool is_sent = false;     ///< start() was called since the last take_sent()

    bool operator==(const State&) const = default;
  };
  const State& state() const { return current_; }
  /// Whether the last start() had something to send.
  bool has_buffers() const { return !parts_.empty(); }
  /// Waits like finish().
  void set_state(const State& state) {
    finish();
    current_ = state;
  }
  void set_required(bool required) { current_.is_required = required; }

 private:
  struct Part {
    std::vector<at::Tensor> buffers;  ///< of one dtype
    at::Tensor flat;                  ///< cached between calls: a captured graph uses it
    std::vector<at::Tensor> views;    ///< of `flat`, with the buffers' shapes
    WorkPtr work;
  };
  void pack(const std::vector<at::Tensor>& buffers);
  void write();

  CommunicatorPtr communicator_;
  std::vector<Part> parts_;
  std::optional<c10::Stream> stream_;
  int root_ = 0;
  bool pending_ = false;  // until finish()
  State current_;
};

}  // namespace ddp::detail
