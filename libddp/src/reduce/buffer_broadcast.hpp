// SPDX-License-Identifier: Apache-2.0
// Sends one rank's buffers to the others beside a backward, which does not read them:
//
//   compute stream | forward | backward ...                      | end: waits, long over
//   own stream               | gather | broadcast | write |
//
// On the CPU the broadcast runs in the communicator's thread, and the end writes.
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

  /// Collective. `buffers` keep their memory until finish(); whoever reads or writes them before
  /// does so in vain or reads either value.
  void start(const std::vector<at::Tensor>& buffers, int root);
  /// The current stream (on the CPU: the host) waits until they are written. Nothing where none
  /// were sent.
  void finish();
  /// Waits as finish() does. Whether start() was called since the last call.
  bool take_sent();
  bool is_sent() const { return is_sent_; }
  void set_sent(bool sent) { is_sent_ = sent; }

 private:
  struct Part {
    std::vector<at::Tensor> buffers;  ///< of one dtype
    at::Tensor flat;                  ///< kept from call to call: a captured graph uses it
    std::vector<at::Tensor> views;    ///< of `flat`, as the buffers are shaped
    WorkPtr work;
  };
  void pack(const std::vector<at::Tensor>& buffers);
  void write();

  CommunicatorPtr communicator_;
  std::vector<Part> parts_;
  std::optional<c10::Stream> stream_;
  int root_ = 0;
  bool pending_ = false;  // until finish()
  bool is_sent_ = false;  // until take_sent()
};

}  // namespace ddp::detail
