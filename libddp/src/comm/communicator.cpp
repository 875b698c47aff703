// SPDX-License-Identifier: Apache-2.0
#include "ddp/comm/communicator.hpp"

#include <utility>

#include "comm/exchange.hpp"
#include "comm/launch_sequencer.hpp"
#include "comm/tuning/group_choices.hpp"

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

Communicator::Communicator(Membership membership, const Communicator* parent)
    : GroupParts(*this, parent), membership_(std::move(membership)) {}

WorkPtr Communicator::all_gather(at::Tensor output, at::Tensor input, at::IntArrayRef sizes) {
  return exchange(detail::all_gather_exchange(*this, output, input, sizes));
}

WorkPtr Communicator::all_to_all(at::Tensor output, at::Tensor input, at::IntArrayRef output_sizes,
                                 at::IntArrayRef input_sizes) {
  return exchange(detail::all_to_all_exchange(*this, output, input, output_sizes, input_sizes));
}

WorkPtr Communicator::gather(at::Tensor output, at::Tensor input, int root) {
  return exchange(detail::gather_exchange(*this, output, input, root));
}

WorkPtr Communicator::scatter(at::Tensor output, at::Tensor input, int root) {
  return exchange(detail::scatter_exchange(*this, output, input, root));
}

GroupScope::GroupScope(Communicator& communicator) : communicator_(communicator) {
  communicator_.group_start();
}

GroupScope::~GroupScope() {
  communicator_.group_end();
}

namespace detail {

GroupParts::GroupParts(Communicator& group, const GroupParts* parent)
    : choices_(std::make_unique<GroupChoices>(group)),
      launch_sequencer_(parent == nullptr ? std::make_shared<LaunchSequencer>()
                                          : parent->launch_sequencer_) {}
GroupParts::~GroupParts() = default;

GroupChoices& GroupParts::choices() {
  return *choices_;
}

LaunchSequencer& GroupParts::launch_sequencer() {
  return *launch_sequencer_;
}

}  // namespace detail
}  // namespace ddp
