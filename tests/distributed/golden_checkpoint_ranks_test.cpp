// SPDX-License-Identifier: Apache-2.0
// The checkpoint with ZeRO and the plan that two ranks of an earlier commit wrote
// (tests/golden/make_checkpoint_golden.cpp) are taken by two ranks with every bit.
#include <nlohmann/json.hpp>
#include <optional>

#include "comm/tuning/group_choices.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "ddp/train/checkpoint.hpp"
#include "distributed/state_parts.hpp"
#include "support/catch.hpp"
#include "support/multi_rank_main.hpp"
#include "unit/golden/golden_state.hpp"
#include "unit/train/temporary_folder.hpp"

using ddp::test::context;
using golden::first_difference;

namespace {

// A copy of a golden file or folder for all ranks; rank 0 removes it after all have used it.
class SharedCopy {
 public:
  explicit SharedCopy(const std::string& name) {
    if (context().is_main()) {
      folder_.emplace();
      path_ = golden::copy_of(name, folder_->path());
    }
    path_ = context().control_plane().broadcast(path_);
  }
  ~SharedCopy() { context().control_plane().barrier(); }
  const std::string& path() const { return path_; }

 private:
  std::optional<testing::TemporaryFolder> folder_;
  std::string path_;
};

// The bytes of the buckets after two backwards, before which nothing can be measured.
std::vector<int64_t> buckets_of(const std::vector<int64_t>& sizes, const ddp::Context& ctx) {
  ddp::DdpOptions options;
  options.bucket_cap_mb = ddp::kAutoBuckets;
  ddp::DistributedDataParallel model(golden::Rows(sizes), ctx.communicator(), options);
  for (int step = 0; step < 2; ++step) {
    model.zero_grad();
    model.forward().backward();
  }
  return model.logging_data().rebuilt_bucket_sizes;
}

}  // namespace

TEST_CASE("two ranks resume an earlier commit's ZeRO, each with its own entries") {
  const SharedCopy folder("zero");
  golden::Net net(at::kBFloat16);
  ddp::DistributedDataParallel model(net, context().communicator());
  auto optimizer = ddp::make_optimizer(model, {.type = ddp::OptimizerType::Adam, .zero1 = true});
  golden::Own own;
  ddp::CheckpointOptions options;
  options.dir = folder.path();
  ddp::Checkpointer checkpointer(context(), options, {model, optimizer, own});
  const auto random_numbers = golden::next_random_numbers(context().rank());
  CHECK(checkpointer.restore() == 1);
  CHECK(testing::same_bits(torch::randint(1 << 20, {8}), random_numbers));
  CHECK(first_difference(ddp::test::copy_of(optimizer->state_dict()),
                         {.tensors = golden::adam_state_with_masters(0, 2),
                          .values = {{"type", std::string("adam")}}}) == "");
  auto leaves = golden::adam_leaves(0);
  golden::add_frozen(leaves, at::kBFloat16);
  golden::add_buffers(leaves, at::kBFloat16);
  CHECK(first_difference(model.state_dict(), {.tensors = leaves, .values = {}}) == "");
  CHECK(first_difference(own.state, golden::own_state(context().rank())) == "");
  CHECK(context().communicator()->choices().plan().find(golden::kGivenBuckets) ==
        golden::kGivenChoice);
}

TEST_CASE("an earlier commit's plan file pins times and buckets, and is left as it is") {
  const SharedCopy file("plan_of_two_ranks.json");
  const auto before = testing::read_file(file.path());
  const auto choices = nlohmann::json::parse(before).at("choices");
  ddp::ContextOptions options;
  options.device = ddp::DeviceChoice::Cpu;
  options.plan_file = file.path();
  auto ctx = ddp::Context::create(options);
  CHECK(choices.size() == 4);
  for (const auto& [name, choice] : choices.items()) {
    CHECK(ctx.communicator()->choices().plan().find(name) == choice.dump());
  }
  CHECK(ctx.communicator()->choices().plan().find("kernels") == golden::kGivenKernels);
  CHECK((ctx.communicator()->choices().all_reduce_table().rows() ==
         ddp::AllReduceTable::from_json(choices.at("all_reduce").dump()).rows()));
  CHECK(buckets_of(golden::kGivenRows, ctx).size() == 3);
  CHECK(buckets_of(golden::kMeasuredRows, ctx).size() ==
        choices.at(golden::kMeasuredBuckets).at("cuts").size());
  ctx.close();
  CHECK(nlohmann::json::parse(testing::read_file(file.path())) == nlohmann::json::parse(before));
}
