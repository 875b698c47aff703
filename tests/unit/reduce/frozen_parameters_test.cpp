// SPDX-License-Identifier: Apache-2.0
#include "reduce/model/frozen_parameters.hpp"

#include <ATen/ATen.h>

#include <memory>

#include "ddp/core/error.hpp"
#include "fake_communicator.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"

using ddp::detail::FrozenParameters;
using testing::FakeCommunicator;
using testing::message_of;

namespace {

struct Three {
  explicit Three(bool is_static = false) : frozen(parameters, communicator, is_static) {}

  const std::shared_ptr<FakeCommunicator> communicator = std::make_shared<FakeCommunicator>();
  const ddp::NamedParameters parameters = [] {
    auto list = testing::parameters_a_and_b();
    list.push_back({"always_frozen", at::zeros({2})});
    return list;
  }();
  const at::Tensor& a = parameters[0].tensor;
  const at::Tensor& b = parameters[1].tensor;
  FrozenParameters frozen;
};

}  // namespace

TEST_CASE("ranks compare frozen parameters only after a change") {
  Three three;
  three.frozen.update(false);
  CHECK(three.communicator->calls.empty());
  CHECK_FALSE(three.frozen.covers_all());
  three.a.set_requires_grad(false);
  three.frozen.update(false);
  const auto num_calls = three.communicator->calls.size();
  CHECK(num_calls > 0);
  CHECK_FALSE(three.frozen.covers_all());
  three.frozen.update(false);
  CHECK(three.communicator->calls.size() == num_calls);
  three.b.set_requires_grad(false);
  three.frozen.update(false);
  CHECK(three.frozen.covers_all());
  three.b.set_requires_grad(true);
  three.frozen.update(false);
  CHECK_FALSE(three.frozen.covers_all());
  CHECK(three.communicator->calls.size() == 3 * num_calls);
}

// Another rank may replay what this one runs eagerly, and compares nothing then.
TEST_CASE("ranks of a model in graphs compare each set of frozen parameters once") {
  Three three;
  const auto update = [&](bool trains_a, bool trains_b) {
    const auto before = three.communicator->calls.size();
    three.a.set_requires_grad(trains_a);
    three.b.set_requires_grad(trains_b);
    three.frozen.update(false, "", /*compares_once=*/true);
    return three.communicator->calls.size() > before;
  };
  CHECK_FALSE(update(true, true));
  CHECK(update(false, true));
  CHECK_FALSE(update(true, true));
  CHECK_FALSE(update(false, true));
  CHECK(update(false, false));
  CHECK(three.frozen.covers_all());
  CHECK_FALSE(update(false, true));
  CHECK_FALSE(three.frozen.covers_all());
}

TEST_CASE("a parameter that is frozen on some ranks only is named") {
  Three three;
  three.communicator->other_rank = [](const at::Tensor& mine) {
    return mine.scalar_type() == at::kByte ? mine.flip(0).roll(-1) : mine;  // "tf-" -> "ft-"
  };
  three.b.set_requires_grad(false);
  CHECK_THAT(message_of<ddp::MismatchError>([&] { three.frozen.update(false); }),
             Catch::Contains("parameter a requires a gradient on rank 0 but is frozen on rank 1"));
  CHECK_THAT(message_of<ddp::MismatchError>([&] { three.frozen.update(false, " of model 'g'"); }),
             Catch::Contains("parameter a of model 'g' requires a gradient on rank 0"));
}

TEST_CASE("changes that a static graph, a join or the buckets exclude are refused by name") {
  {
    Three three(/*is_static=*/true);
    three.b.set_requires_grad(false);
    CHECK_THAT(message_of<ddp::SettingsError>([&] { three.frozen.update(false); }),
               Catch::Contains("parameter b") && Catch::Contains("ddp.static_graph=true"));
  }
  Three three;
  three.b.set_requires_grad(false);
  CHECK_THAT(message_of<ddp::SettingsError>([&] { three.frozen.update(/*in_join=*/true); }),
             Catch::Contains("parameter b") && Catch::Contains("inside a join"));
  three.b.set_requires_grad(true);
  three.parameters[2].tensor.set_requires_grad(true);
  CHECK_THAT(message_of<ddp::SettingsError>([&] { three.frozen.update(false); }),
             Catch::Contains("parameter always_frozen was frozen when the model was wrapped"));
}
