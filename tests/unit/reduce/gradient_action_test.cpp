// SPDX-License-Identifier: Apache-2.0
// The whole table of forwards and backwards, as the rules that it follows.
#include "reduce/gradient_action.hpp"

#include <vector>

#include "support/catch.hpp"

using ddp::detail::action_for;
using ddp::detail::Backward;
using ddp::detail::Forwards;
using ddp::detail::GradientAction;

namespace {

const std::vector<Forwards> kForwards{Forwards::Untracked, Forwards::Synchronised, Forwards::Local,
                                      Forwards::Neither};
const std::vector<Forwards> kTracked{Forwards::Synchronised, Forwards::Local, Forwards::Neither};
const std::vector<Backward> kBackwards{Backward::Synchronised,   Backward::Repeated,
                                       Backward::Local,          Backward::Unknown,
                                       Backward::UnknownSharing, Backward::Shared};

}  // namespace

TEST_CASE("a backward of a synchronised forward is reduced whatever else ran") {
  for (const auto forwards : kForwards) {
    CHECK(action_for(forwards, Backward::Synchronised) == GradientAction::Reduce);
  }
}

TEST_CASE("any backward may be the one of a forward that nothing tracks") {
  for (const auto backward : kBackwards) {
    CHECK(action_for(Forwards::Untracked, backward) == GradientAction::Reduce);
  }
}

TEST_CASE("a backward that reaches an output is judged by that output alone") {
  for (const auto forwards : kTracked) {
    CHECK(action_for(forwards, Backward::Local) == GradientAction::Accumulate);
    CHECK(action_for(forwards, Backward::Repeated) == GradientAction::AccumulateAndWarn);
  }
}

TEST_CASE("a gradient of a shared parameter is left to the other model if no output shows whose") {
  for (const auto forwards : kTracked) {
    CHECK(action_for(forwards, Backward::Shared) == GradientAction::LeaveToOther);
  }
}

TEST_CASE("a backward that reaches no output belongs to the last forward") {
  CHECK(action_for(Forwards::Synchronised, Backward::Unknown) == GradientAction::Reduce);
  for (const auto backward : {Backward::Unknown, Backward::UnknownSharing}) {
    CHECK(action_for(Forwards::Local, backward) == GradientAction::Accumulate);
    CHECK(action_for(Forwards::Neither, backward) == GradientAction::AccumulateAndWarn);
  }
  // It may be one of the other model, which this model must not start a reduction for.
  CHECK(action_for(Forwards::Synchronised, Backward::UnknownSharing) ==
        GradientAction::AccumulateAndWarn);
}
