// SPDX-License-Identifier: Apache-2.0
#include "reduce/buckets/gradient_arena.hpp"

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/detail/check.hpp"
#include "fake_communicator.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"

using ddp::detail::GradientArena;
using testing::filled_like;
using testing::message_of;
using testing::options_of_any_layout;
using testing::parameters_a_and_b;

namespace {

/// The parameters "a" and "b" and their gradients at world size 1.
struct ArenaOfTwo {
  explicit ArenaOfTwo(const ddp::DdpOptions& options = options_of_any_layout())
      : arena(parameters, communicator, options) {}

  at::Tensor& grad(size_t i) { return parameters[i].tensor.mutable_grad(); }
  at::Tensor slot(int i) const { return arena.slot(i).memory; }
  bool lies_in_slot(size_t i) {
    return grad(i).defined() && grad(i).data_ptr() == slot(static_cast<int>(i)).data_ptr();
  }
  /// Leaves the value 1 as mean of "a" and 2 as mean of "b", as a synchronised backward does.
  void reduce_1_and_2() {
    grad(0) = filled_like(parameters[0].tensor, 1);
    grad(1) = filled_like(parameters[1].tensor, 2);
    arena.gather(0);  // one bucket
    arena.publish({});
  }

  ddp::CommunicatorPtr communicator = ddp::make_single_communicator(at::kCPU);
  ddp::NamedParameters parameters = parameters_a_and_b();
  GradientArena arena;
};

bool all_are(const at::Tensor& tensor, double value) {
  return tensor.eq(value).all().item<bool>();
}

}  // namespace

TEST_CASE("a slot has the strides of a dense parameter") {
  const auto filter =
      at::zeros({4, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
  const auto column = at::zeros({4, 6}).narrow(1, 0, 3).requires_grad_();
  const GradientArena arena({{"filter", filter}, {"column", column}},
                            ddp::make_single_communicator(at::kCPU), {});
  CHECK(arena.slot(0).memory.strides() == filter.strides());
  CHECK(arena.slot(1).memory.sizes() == column.sizes());
  CHECK(arena.slot(1).memory.is_contiguous());  // memory between the columns would be wasted
}

TEST_CASE("ops find a slot only as long as its arena lives") {
  const auto weight = at::zeros({3}).requires_grad_();
  {
    const GradientArena arena({{"weight", weight}}, ddp::make_single_communicator(at::kCPU), {});
    CHECK(ddp::ops::find_grad_slot(weight) == &arena.slot(0));
  }
  CHECK(ddp::ops::find_grad_slot(weight) == nullptr);
}

TEST_CASE("ops find no slot of two arenas, and the other one's after the end of either") {
  const auto weight = at::zeros({3}).requires_grad_();
  const auto make = [&] {
    return std::make_unique<GradientArena>(ddp::NamedParameters{{"weight", weight}},
                                           ddp::make_single_communicator(at::kCPU),
                                           ddp::DdpOptions{});
  };
  const bool older_ends = GENERATE(true, false);
  auto older = make(), newer = make();
  CHECK(ddp::ops::find_grad_slot(weight) == nullptr);
  CHECK(ddp::ops::has_several_grad_slots(weight));
  auto& ends = older_ends ? older : newer;
  const auto& stays = older_ends ? newer : older;
  ends.reset();
  CHECK(ddp::ops::find_grad_slot(weight) == &stays->slot(0));
  CHECK_FALSE(ddp::ops::has_several_grad_slots(weight));
}

TEST_CASE("ops find no slot where hooks of the user's read the gradient") {
  const auto weight = at::zeros({3}).requires_grad_();
  const GradientArena arena({{"weight", weight}}, ddp::make_single_communicator(at::kCPU), {});
  weight.register_hook([](const at::Tensor&) {});
  CHECK(ddp::ops::find_grad_slot(weight) == nullptr);
}

TEST_CASE("ops find no slot of a frozen parameter") {
  const auto weight = at::zeros({3}).requires_grad_();
  const GradientArena arena({{"weight", weight}}, ddp::make_single_communicator(at::kCPU), {});
  weight.set_requires_grad(false);
  CHECK(ddp::ops::find_grad_slot(weight) == nullptr);
  weight.set_requires_grad(true);
  CHECK(ddp::ops::find_grad_slot(weight) == &arena.slot(0));
}

TEST_CASE("a mean in another arena's slot is set aside and refused if sharded") {
  ArenaOfTwo older;
  const bool is_sharded = GENERATE(false, true);
  GradientArena newer(older.parameters, older.communicator, options_of_any_layout());
  if (is_sharded) {
    older.arena.shard();
  }
  older.reduce_1_and_2();
  if (is_sharded) {
    CHECK(ddp::ops::has_sharded_gradient(older.parameters[0].tensor));
    for (const bool gathers : {true, false}) {
      const auto message = message_of<ddp::SettingsError>(
          [&] { gathers ? newer.gather(0) : newer.set_reduced_aside(); });
      CHECK_THAT(message, Catch::Contains("optimizer.zero1=true"));
    }
    return;
  }
  newer.set_reduced_aside();
  CHECK(older.grad(0).data_ptr() == newer.slot(0).memory.data_ptr());
  CHECK(all_are(older.grad(0), 0));
  newer.add_set_aside();
  CHECK(all_are(older.grad(0), 1));
}

TEST_CASE("a shared gradient stays apart from the bucket until it is published") {
  ArenaOfTwo older;
  GradientArena newer(older.parameters, older.communicator, options_of_any_layout());
  older.reduce_1_and_2();  // .grad is the older arena's slot
  older.arena.gather(0);
  older.slot(0).fill_(100);  // as a reduction does
  newer.gather(0);
  CHECK(all_are(newer.slot(0).memory, 1));
  newer.publish({});
  CHECK(older.grad(0).data_ptr() == newer.slot(0).memory.data_ptr());
}

TEST_CASE("ops find a slot by its parameter, in the memory that it had") {
  static ddp::ops::GradSlot slot{at::zeros({3})};  // its entry stays
  auto weight = at::zeros({3}).requires_grad_();
  const auto* const address = weight.unsafeGetTensorImpl();
  ddp::ops::add_grad_slot(weight, slot);
  CHECK(ddp::ops::find_grad_slot(weight) == &slot);
  CHECK(ddp::ops::find_grad_slot(weight.detach()) == nullptr);
  CHECK(ddp::ops::find_grad_slot(weight.view({3})) == nullptr);
  const auto memory = weight.detach();
  weight.set_data(at::zeros({3}));
  CHECK(ddp::ops::find_grad_slot(weight) == nullptr);
  weight.set_data(memory);
  CHECK(ddp::ops::find_grad_slot(weight) == &slot);
  // The entry keeps the parameter, so no new tensor gets its address and with it the slot.
  weight = at::Tensor();
  for (int i = 0; i < 100; ++i) {
    weight = at::zeros({3}).requires_grad_();
    REQUIRE(weight.unsafeGetTensorImpl() != address);
    REQUIRE(ddp::ops::find_grad_slot(weight) == nullptr);
  }
}

TEST_CASE("threads ask for slots while other models come and go") {
  const auto weight = at::zeros({3}).requires_grad_();
  const GradientArena arena({{"weight", weight}}, ddp::make_single_communicator(at::kCPU), {});
  std::vector<std::thread> others;
  for (int t = 0; t < 3; ++t) {
    others.emplace_back([] {
      for (int i = 0; i < 200; ++i) {
        const auto own = at::zeros({3}).requires_grad_();
        ddp::ops::GradSlot slot{at::zeros({3})};
        ddp::ops::add_grad_slot(own, slot);
        DDP_CHECK(ddp::ops::find_grad_slot(own) == &slot);
        ddp::ops::remove_grad_slot(own, slot);
      }
    });
  }
  for (int i = 0; i < 1000; ++i) {
    REQUIRE(ddp::ops::find_grad_slot(weight) == &arena.slot(0));
  }
  for (auto& thread : others) {
    thread.join();
  }
}

TEST_CASE("a shared mean of a parameter that a weighted backward does not use stays in .grad") {
  ArenaOfTwo older;
  const GradientArena newer(older.parameters, older.communicator, options_of_any_layout());
  older.reduce_1_and_2();
  older.arena.set_reduced_aside();
  older.arena.gather(0);
  older.arena.add_set_aside();
  older.arena.publish({true, false});
  CHECK(all_are(older.grad(1), 2));
  CHECK(ddp::ops::slot_of_grad(older.parameters[1].tensor)->reduced);
}

TEST_CASE("a parameter on another device is named") {
  const auto weight = at::zeros({3}, at::device(at::kMeta)).requires_grad_();
  const auto message = message_of<ddp::SettingsError>([&] {
    const GradientArena arena({{"weight", weight}}, ddp::make_single_communicator(at::kCPU), {});
  });
  CHECK_THAT(message, Catch::Contains("parameter weight is on meta"));
}

TEST_CASE("gather copies a gradient into its slot and makes the slot .grad") {
  ArenaOfTwo two;
  const auto values = at::arange(6, at::kFloat).view({2, 3});
  two.grad(0) = values.clone();
  two.grad(1) = filled_like(two.parameters[1].tensor, 7);
  two.arena.gather(0);  // one bucket
  CHECK(two.slot(0).equal(values));
  CHECK(all_are(two.slot(1), 7));
  CHECK(two.lies_in_slot(0));
  CHECK(two.lies_in_slot(1));
}

TEST_CASE("gather casts to the dtype of the slot") {
  const auto weight = at::zeros({3}, at::kBFloat16).requires_grad_();
  const bool fp32_grads = GENERATE(true, false);
  GradientArena arena({{"weight", weight}}, ddp::make_single_communicator(at::kCPU),
                      {.fp32_grads = fp32_grads});
  weight.mutable_grad() = at::full({3}, 2.5, at::kBFloat16);
  arena.gather(0);
  CHECK(weight.grad().scalar_type() == (fp32_grads ? at::kFloat : at::kBFloat16));
  CHECK(all_are(arena.slot(0).memory, 2.5));
}

TEST_CASE("gather adds a gradient to what an op wrote into the slot") {
  ArenaOfTwo two;
  auto* slot = ddp::ops::find_grad_slot(two.parameters[0].tensor);
  CHECK(ddp::ops::begin_grad_write(two.parameters[0].tensor, *slot) == 0);
  slot->memory.fill_(2);
  two.grad(0) = filled_like(two.parameters[0].tensor, 1);
  two.arena.gather(0);
  CHECK(all_are(two.slot(0), 3));
  CHECK_FALSE(slot->written);
}

TEST_CASE("gather writes zeros where a parameter has no gradient, and gather_local does not") {
  ArenaOfTwo two;
  two.slot(1).fill_(5);
  two.arena.gather_local({0, 1});
  CHECK(all_are(two.slot(1), 5));
  two.arena.gather(0);
  CHECK(all_are(two.slot(1), 0));
  CHECK_FALSE(two.grad(1).defined());
}

TEST_CASE("gather touches only its own bucket") {
  ArenaOfTwo two;
  two.arena.set_layout(testing::one_bucket_each(two.arena.specs(), 1));
  two.grad(0) = filled_like(two.parameters[0].tensor, 1);
  two.grad(1) = filled_like(two.parameters[1].tensor, 1);
  two.arena.gather(1);
  CHECK_FALSE(two.lies_in_slot(0));
  CHECK(two.lies_in_slot(1));
}

TEST_CASE("publish leaves the .grad of a parameter that no rank used") {
  ArenaOfTwo two;
  const auto own = filled_like(two.parameters[1].tensor, 9);
  two.grad(1) = own;
  two.arena.publish({true, false});
  CHECK(two.lies_in_slot(0));
  CHECK(two.grad(1).is_same(own));
  two.arena.publish({});
  CHECK(two.lies_in_slot(1));
}

TEST_CASE("forget_writes drops what ops wrote in a backward that threw") {
  ArenaOfTwo two;
  auto* slot = ddp::ops::find_grad_slot(two.parameters[0].tensor);
  ddp::ops::begin_grad_write(two.parameters[0].tensor, *slot);
  slot->memory.fill_(4);
  two.arena.forget_writes();
  two.arena.gather(0);
  CHECK(all_are(two.slot(0), 0));
}

TEST_CASE("set_layout moves the gradients that lie in slots") {
  ArenaOfTwo two;
  two.reduce_1_and_2();
  const auto own = filled_like(two.parameters[1].tensor, 9);
  two.grad(1) = own;
  const void* before = two.slot(0).data_ptr();
  auto layout = ddp::assign_buckets(two.arena.specs(), {.limits_bytes = {1}}, {1, 0});
  layout.version = 7;
  two.arena.set_layout(layout);
  CHECK(two.arena.layout().version == 7);
  CHECK(two.arena.buckets().size() == 2);
  CHECK(two.slot(0).data_ptr() != before);
  CHECK(two.lies_in_slot(0));
  CHECK(all_are(two.grad(0), 1));
  CHECK(two.grad(1).is_same(own));
  CHECK(all_are(two.arena.bucket(0).buffer, 0));  // of "b": the mean at its old place is gone
  CHECK(two.arena.bucket(1).buffer.sum().item<double>() == 6);
}

TEST_CASE("parts of means do not move: another rank has the rest") {
  ArenaOfTwo two;
  const auto layout = ddp::assign_buckets(two.arena.specs(), {.limits_bytes = {1}}, {1, 0});
  two.reduce_1_and_2();
  CHECK_FALSE(two.arena.holds_partial_means());  // each rank has the whole mean
  two.grad(0).reset();
  two.grad(1).reset();
  two.arena.shard();
  two.grad(0) = filled_like(two.parameters[0].tensor, 1);
  two.arena.gather_local({0, 1});
  CHECK_FALSE(two.arena.holds_partial_means());  // a local gradient is whole
  two.arena.publish({true, false});
  CHECK(two.arena.holds_partial_means());
  CHECK_THROWS_AS(two.arena.set_layout(layout), ddp::InternalError);
  two.grad(0).reset();
  CHECK_FALSE(two.arena.holds_partial_means());
  two.arena.set_layout(layout);
  CHECK(two.arena.buckets().size() == 2);
}

TEST_CASE("a gradient that moved with set_layout still counts as reduced") {
  ArenaOfTwo two;
  two.reduce_1_and_2();
  two.arena.set_layout(ddp::assign_buckets(two.arena.specs(), {.limits_bytes = {1}}, {1, 0}));
  two.arena.set_reduced_aside();
  CHECK(all_are(two.slot(0), 0));
  two.arena.add_set_aside();
  CHECK(all_are(two.slot(0), 1));
}

TEST_CASE("restore gives back gradients, marks and writes") {
  ArenaOfTwo two;
  two.reduce_1_and_2();
  const auto own = filled_like(two.parameters[1].tensor, 9);
  two.grad(1) = own;
  auto* slot = ddp::ops::find_grad_slot(two.parameters[1].tensor);
  slot->written = true;
  const auto saved = two.arena.save(/*copies=*/false);
  two.arena.drop();
  CHECK_FALSE(two.grad(0).defined());
  CHECK_FALSE(two.grad(1).defined());
  CHECK_FALSE(slot->written);
  two.arena.restore(saved);
  CHECK(two.lies_in_slot(0));
  CHECK(all_are(two.grad(0), 1));
  CHECK(two.grad(1).is_same(own));
  CHECK(slot->written);
  two.arena.set_reduced_aside();  // "a" is reduced again
  CHECK(all_are(two.slot(0), 0));
}

TEST_CASE("saved copies survive overwritten buckets") {
  ArenaOfTwo two;
  two.reduce_1_and_2();
  const auto saved = two.arena.save(/*copies=*/true);
  for (int b = 0; b < static_cast<int>(two.arena.layout().buckets.size()); ++b) {
    two.arena.bucket(b).buffer.zero_();
  }
  CHECK(all_are(two.slot(1), 0));
  two.arena.restore(saved);
  CHECK(two.lies_in_slot(0));
  CHECK(all_are(two.grad(0), 1));
  CHECK(all_are(two.grad(1), 2));
}

TEST_CASE("saved copies go to their slots of a later layout") {
  ArenaOfTwo two;
  two.reduce_1_and_2();
  const auto own = filled_like(two.parameters[1].tensor, 9);
  two.grad(1) = own;
  const auto saved = two.arena.save(/*copies=*/true);
  two.arena.drop();
  two.arena.set_layout(ddp::assign_buckets(two.arena.specs(), {.limits_bytes = {1}}, {1, 0}));
  const void* place = two.slot(0).data_ptr();
  two.arena.restore(saved);
  CHECK(two.slot(0).data_ptr() == place);
  CHECK(two.lies_in_slot(0));
  CHECK(all_are(two.grad(0), 1));
  CHECK(two.grad(1).is_same(own));
}

TEST_CASE("means are set aside once and added again") {
  ArenaOfTwo two;
  two.reduce_1_and_2();
  two.arena.set_reduced_aside();
  CHECK(two.lies_in_slot(0));
  CHECK(all_are(two.slot(0), 0));
  two.slot(0).fill_(10);  // the next backward
  two.arena.set_reduced_aside();
  CHECK(all_are(two.slot(0), 10));
  two.arena.add_set_aside();
  CHECK(all_are(two.slot(0), 11));
  CHECK(all_are(two.slot(1), 2));
  two.arena.add_set_aside();
  CHECK(all_are(two.slot(0), 11));
}

TEST_CASE("gradients that are not reduced are not set aside") {
  ArenaOfTwo two;
  two.reduce_1_and_2();
  two.grad(0) = filled_like(two.parameters[0].tensor, 3);  // zero_grad() and another backward
  two.arena.gather_local({0, 1});
  two.arena.set_reduced_aside();
  CHECK(all_are(two.slot(0), 3));
  CHECK(all_are(two.slot(1), 0));
}

TEST_CASE("a slot that an op wrote again holds no mean") {
  ArenaOfTwo two;
  two.reduce_1_and_2();
  two.grad(0) = at::Tensor();
  auto* slot = ddp::ops::find_grad_slot(two.parameters[0].tensor);
  ddp::ops::begin_grad_write(two.parameters[0].tensor, *slot);
  slot->memory.fill_(3);
  two.arena.gather_local({0, 1});
  two.arena.set_reduced_aside();
  CHECK(all_are(two.slot(0), 3));
}

TEST_CASE("a mean that was set aside goes with its .grad") {
  ArenaOfTwo two;
  two.reduce_1_and_2();
  two.arena.set_reduced_aside();
  two.grad(0) = at::Tensor();  // zero_grad(), and the next backward reaches "b" only
  two.grad(1) = filled_like(two.parameters[1].tensor, 7);
  two.arena.gather(0);
  two.arena.add_set_aside();
  CHECK(all_are(two.slot(0), 0));
  CHECK(all_are(two.slot(1), 7));
}

TEST_CASE("what is left in an unused .grad outlives the reduction, unless another rank used it") {
  const bool is_aside = GENERATE(false, true);
  const bool is_used_elsewhere = GENERATE(false, true);
  ArenaOfTwo two;
  two.reduce_1_and_2();
  if (is_aside) {
    two.arena.set_reduced_aside();
  }
  two.arena.gather(0, {true, false});
  two.arena.bucket(0).buffer.fill_(5);  // as a reduction does
  two.arena.add_set_aside();
  two.arena.publish({true, is_used_elsewhere});
  CHECK(two.lies_in_slot(1));
  CHECK(all_are(two.grad(1), is_used_elsewhere ? (is_aside ? 7 : 5) : 2));
  CHECK(two.arena.slot(1).reduced);
}

TEST_CASE("a sharded arena reduces this rank's half of each bucket") {
  const auto communicator = std::make_shared<testing::FakeCommunicator>();
  const auto parameters = parameters_a_and_b();
  const auto& [name, tensor] = parameters[0];
  std::optional<GradientArena> of_two(std::in_place, parameters, communicator, ddp::DdpOptions{});
  GradientArena& arena = *of_two;
  arena.publish({});
  CHECK(arena.bucket_shard(0).is_same(arena.buckets()[0].shard));
  CHECK(arena.bucket_shard(0).numel() == arena.bucket(0).buffer.numel());
  CHECK_FALSE(ddp::ops::has_sharded_gradient(tensor));
  arena.shard();
  CHECK(arena.is_sharded());
  CHECK(arena.bucket_shard(0).numel() * 2 == arena.bucket(0).buffer.numel());
  CHECK(arena.bucket_shard(0).data_ptr() == arena.bucket(0).buffer.data_ptr());  // rank 0
  CHECK(ddp::ops::has_sharded_gradient(tensor));
  arena.restore(arena.save(/*copies=*/true));
  CHECK(ddp::ops::has_sharded_gradient(tensor));
  CHECK_FALSE(ddp::ops::has_sharded_gradient(tensor.detach()));
  parameters[1].tensor.mutable_grad() = at::ones_like(parameters[1].tensor.detach());
  CHECK_FALSE(ddp::ops::has_sharded_gradient(parameters[1].tensor));
  of_two.reset();  // no code could tell any more that this is a part
  CHECK_FALSE(tensor.grad().defined());
  CHECK(parameters[1].tensor.grad().defined());
}

TEST_CASE("a sharded mean refuses what would be added to it") {
  ArenaOfTwo two;
  two.arena.shard();
  two.reduce_1_and_2();
  for (const bool gathers : {true, false}) {
    const auto message = message_of<ddp::SettingsError>(
        [&] { gathers ? two.arena.gather(0) : two.arena.set_reduced_aside(); });
    CHECK_THAT(message, Catch::Contains("optimizer.zero1=true") && Catch::Contains("gradient of"));
  }
  two.grad(0) = two.grad(1) = at::Tensor();  // zero_grad()
  two.reduce_1_and_2();
  CHECK(all_are(two.slot(0), 1));
}
