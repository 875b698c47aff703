// SPDX-License-Identifier: Apache-2.0
#include "reduce/model/model_state.hpp"

#include <ATen/ATen.h>

#include "support/catch.hpp"
#include "support/message_of.hpp"

using ddp::detail::ModelState;

namespace {

ddp::ModelTensors one_of_each() {
  auto trained = at::arange(3, at::kFloat).requires_grad_(true);
  return {.parameters = {{"trained", trained}, {"frozen", at::ones({2})}},
          .buffers = {{"buffer", at::full({2}, 5.0)}}};
}

}  // namespace

TEST_CASE("a model's state holds trained, frozen and ignored tensors") {
  const ModelState state(one_of_each(), {"buffer"}, /*has_peers=*/true);
  const auto saved = state.save();
  CHECK(saved.values.empty());
  REQUIRE(saved.tensors.size() == 4);
  CHECK(saved.tensors.contains("trained"));
  CHECK(saved.tensors.contains("frozen"));
  CHECK(saved.tensors.contains("buffer"));
  CHECK(saved.tensors.contains("rank_local.buffer"));
  CHECK(ModelState(one_of_each(), {"buffer"}, false).save().tensors.size() == 3);
}

TEST_CASE("each rank loads its own value of an ignored tensor") {
  const auto tensors = one_of_each();
  ModelState state(tensors, {"buffer"}, /*has_peers=*/true);
  auto saved = state.save();
  saved.tensors["buffer"] = at::full({2}, 7.0);
  saved.tensors["rank_local.buffer"] = at::full({2}, 8.0);
  state.load(saved);
  CHECK(at::equal(tensors.buffers[0].tensor, at::full({2}, 8.0)));
}

TEST_CASE("a state without the frozen base loads over an equal base only") {
  const auto tensors = one_of_each();
  ModelState state(tensors, {}, false);
  const auto whole = state.save();
  state.leave_frozen_out();
  tensors.parameters[0].tensor.set_requires_grad(false);  // between steps
  const auto saved = state.save();
  CHECK(saved.tensors.contains("trained"));
  CHECK_FALSE(saved.tensors.contains("frozen"));
  CHECK_NOTHROW(state.load(saved));
  CHECK_THAT(testing::message_of([&] { state.load(whole); }),
             Catch::Contains("it has the whole model"));

  auto other = one_of_each();
  other.parameters[1].tensor.fill_(2);
  ModelState other_state(other, {}, false);
  other_state.leave_frozen_out();
  CHECK_THAT(testing::message_of([&] { other_state.load(saved); }),
             Catch::Contains("it was trained over another base"));
}

TEST_CASE("the state of another model is refused before a tensor is written") {
  const auto tensors = one_of_each();
  ModelState state(tensors, {}, false);
  auto missing = state.save();
  missing.tensors["trained"] = at::zeros({3});
  missing.tensors.erase("buffer");
  CHECK_THAT(testing::message_of([&] { state.load(missing); }),
             Catch::Contains("the saved model has no buffer"));
  auto extra = state.save();
  extra.tensors["more"] = at::zeros({1});
  CHECK_THAT(testing::message_of([&] { state.load(extra); }),
             Catch::Contains("the saved model has more, which this model does not have"));
  CHECK(at::equal(tensors.parameters[0].tensor, at::arange(3, at::kFloat)));
}
