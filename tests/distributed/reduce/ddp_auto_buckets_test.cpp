// SPDX-License-Identifier: Apache-2.0
// ddp.bucket_cap_mb=auto: every rank uses rank 0's choice, gradients do not depend on the buckets,
// and a plan fixes the choice. Also tests buckets that are launched together.
#include <sstream>

#include "comm/string_collectives.hpp"
#include "comm/tuning/group_choices.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "reduce/reducer.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

DdpOptions with_auto() {
  DdpOptions options;
  options.bucket_cap_mb = kAutoBuckets;
  return options;
}

CommunicatorPtr fresh_group() {
  return group()->split(0, rank());
}

std::string layout_text(const BucketLayout& layout) {
  std::ostringstream text;
  for (const auto& bucket : layout.buckets) {
    text << bucket.launch << ":";
    for (const int index : bucket.parameters) {
      text << index << ",";
    }
  }
  return text.str();
}

std::string buckets_choice(Plan& plan) {
  return plan.find("buckets of 6 gradients, 292 bytes, hook none").value_or("");
}

template <typename Model>
void check_step(Model& model, Mlp& module, Mlp& reference, int64_t step) {
  model.zero_grad();
  model.forward(batch_of(rank(), step, 4)).sum().backward();
  require_equal(grads_of(*module), mean_reference(reference, [&](Mlp& plain) {
                  return plain->forward(concatenated(step, 4)).sum();
                }));
}

}  // namespace

TEST_CASE("auto buckets: agreed, and the gradients do not change") {
  const auto comm = fresh_group();
  Mlp module;
  Mlp reference;
  DistributedDataParallel model(module, comm, with_auto());
  for (int step = 0; step < 6; ++step) {
    CAPTURE(step);
    check_step(model, module, reference, step);
    // The first backward determines the order; two more are measured.
    CHECK(model.logging_data().has_rebuilt_buckets == (world() > 1 && step >= 3));
  }
  const auto own = layout_text(model.reducer().gradients().layout());
  for (const auto& other : ddp::detail::all_gather_string(*comm, own)) {
    CHECK(other == own);
  }
  CHECK(buckets_choice(comm->choices().plan()).empty() == (world() == 1));
}

TEST_CASE("auto buckets: a plan pins the choice, and no backward is measured for it") {
  if (world() == 1) {
    return;
  }
  const auto comm = fresh_group();
  comm->choices().plan().set("all_reduce", "[[1024,10.0,0.0],[2048,12.0,0.0]]");
  comm->choices().plan().set("buckets of 6 gradients, 292 bytes, hook none",
                             R"({"cuts":[1,4,6],"exposed_us":5.0,"gradients":6,"bytes":292})");
  Mlp module;
  Mlp reference;
  DistributedDataParallel model(module, comm, with_auto());
  for (int step = 0; step < 3; ++step) {
    check_step(model, module, reference, step);
  }
  const auto& buckets = model.reducer().gradients().layout().buckets;
  REQUIRE(buckets.size() == 3);
  CHECK(buckets[0].parameters.size() == 1);
  CHECK(buckets[1].parameters.size() == 3);
  CHECK(buckets[2].parameters.size() == 2);
}

TEST_CASE("auto buckets: a damaged choice in a plan is made anew") {
  if (world() == 1) {
    return;
  }
  const auto comm = fresh_group();
  comm->choices().plan().set("buckets of 6 gradients, 292 bytes, hook none",
                             R"({"cuts":[4,1,6],"exposed_us":5.0,"gradients":6,"bytes":292})");
  Mlp module;
  Mlp reference;
  DistributedDataParallel model(module, comm, with_auto());
  for (int step = 0; step < 5; ++step) {
    CAPTURE(step);
    check_step(model, module, reference, step);
    CHECK(model.logging_data().has_rebuilt_buckets == (step >= 3));
  }
  CHECK(buckets_choice(comm->choices().plan()).find("[4,1,6]") == std::string::npos);
}

TEST_CASE("auto buckets beside find_unused_parameters, which never lays out anew") {
  auto options = with_auto();
  options.find_unused_parameters = true;
  Mlp module;
  Mlp reference;
  DistributedDataParallel model(module, fresh_group(), options);
  for (int step = 0; step < 5; ++step) {
    check_step(model, module, reference, step);
  }
  CHECK_FALSE(model.logging_data().has_rebuilt_buckets);
}

TEST_CASE("buckets of two dtypes that end together are launched together") {
  const auto hook =
      GENERATE(CommHookType::None, CommHookType::AllReduce, CommHookType::Bf16Compress);
  CAPTURE(hook);
  DdpOptions options;
  options.fp32_grads = false;
  options.comm_hook = hook;
  Mlp module;
  Mlp reference;
  module->second->to(torch::kDouble);
  reference->second->to(torch::kDouble);
  const auto forward = [](Mlp& mlp, const torch::Tensor& x) {
    const auto hidden = torch::relu(mlp->first(x)).to(torch::kDouble);
    return mlp->third(torch::relu(mlp->second(hidden)).to(torch::kFloat)).sum();
  };
  DistributedDataParallel model(module, fresh_group(), options);
  for (int step = 0; step < 4; ++step) {
    model.zero_grad();
    auto loss = forward(module, batch_of(rank(), step, 4));
    model.prepare_for_backward({loss});
    loss.backward();
    require_equal(grads_of(*module), mean_reference(reference, [&](Mlp& plain) {
                    return forward(plain, concatenated(step, 4));
                  }));
  }
  const auto& buckets = model.reducer().gradients().layout().buckets;
  REQUIRE(buckets.size() == 2);
  CHECK(buckets[0].launch == buckets[1].launch);
}
