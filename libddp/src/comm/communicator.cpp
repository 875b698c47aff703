// SPDX-License-Identifier: Apache-2.0
#include "ddp/comm/communicator.hpp"

#include "ddp/comm/launch_sequencer.hpp"
#include "ddp/core/error.hpp"

namespace ddp {

const char* to_string(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
      return "sum";
    case ReduceOp::Avg:
      return "avg";
    case ReduceOp::Min:
      return "min";
    case ReduceOp::Max:
      return "max";
    case ReduceOp::Product:
      return "product";
  }
  return "unknown";
}

Communicator::Communicator() : launch_sequencer_(std::make_shared<LaunchSequencer>()) {}

void Communicator::share_launch_sequencer_of(const Communicator& parent) {
  launch_sequencer_ = parent.launch_sequencer_;
}

LaunchSequencer& Communicator::launch_sequencer() {
  return *launch_sequencer_;
}

}  // namespace ddp
