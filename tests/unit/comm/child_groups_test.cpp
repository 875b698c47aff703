// SPDX-License-Identifier: Apache-2.0
#include "comm/child_groups.hpp"

#include <ATen/ATen.h>

#include "ddp/core/error.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"

namespace {

std::string error_of_barrier(ddp::Communicator& communicator) {
  return testing::message_of<ddp::PeerLostError>([&] { communicator.barrier(); });
}

}  // namespace

TEST_CASE("groups abort with the communicator they were split from") {
  ddp::detail::ChildGroups children;
  const auto first = ddp::make_single_communicator(at::kCPU);
  auto dropped = ddp::make_single_communicator(at::kCPU);
  const auto second = ddp::make_single_communicator(at::kCPU);
  const auto other = ddp::make_single_communicator(at::kCPU);
  children.add(first);
  children.add(dropped);
  const std::weak_ptr<ddp::Communicator> is_alive = dropped;
  dropped.reset();
  CHECK(is_alive.expired());  // a parent does not keep its groups alive
  children.add(second);
  CHECK(error_of_barrier(*first).empty());

  children.abort("rank 2 is lost");
  CHECK(error_of_barrier(*first) == "barrier: the communicator was aborted: rank 2 is lost");
  CHECK(error_of_barrier(*second) == "barrier: the communicator was aborted: rank 2 is lost");
  CHECK(error_of_barrier(*other).empty());
}
