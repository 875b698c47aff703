// SPDX-License-Identifier: Apache-2.0
// Divided state: keys, parts joined to wholes, and their description in a checkpoint's file.
#include "train/checkpoint/state_entry.hpp"

#include <torch/torch.h>

#include "ddp/core/error.hpp"
#include "ddp/core/safetensors.hpp"
#include "support/catch.hpp"
#include "support/same_bits.hpp"
#include "unit/train/checkpoint/checkpoint_objects.hpp"
#include "unit/train/thread_control_plane.hpp"

namespace {

using ddp::StateDict;
using ddp::StateKey;
using ddp::StateSlice;
using ddp::detail::parse_entries;
using ddp::detail::StateEntry;

// The elements of `whole`, in memory order, cut before each of `cuts`.
std::vector<ddp::StatePart> cut(const at::Tensor& whole, const std::vector<int64_t>& cuts) {
  const auto flat = whole.as_strided({whole.numel()}, {1});
  std::vector<ddp::StatePart> parts;
  for (std::size_t i = 0; i <= cuts.size(); ++i) {
    const int64_t begin = i == 0 ? 0 : cuts[i - 1];
    const int64_t end = i == cuts.size() ? whole.numel() : cuts[i];
    parts.push_back(
        {{whole.sizes().vec(), whole.strides().vec(), begin}, flat.narrow(0, begin, end - begin)});
  }
  return parts;
}

// Keeps what it is given.
struct Kept : ddp::Stateful {
  std::string state_name() const override { return "optimizer"; }
  StateDict state_dict() const override { return state; }
  void load_state_dict(const StateDict& loaded) override { state = loaded; }
  StateDict state;
};

// One rank for each part.
std::vector<std::exception_ptr> save(const ddp::CheckpointOptions& options,
                                     const std::vector<ddp::StatePart>& parts) {
  return testing::run_ranks(static_cast<int>(parts.size()), [&](ddp::ControlPlane& plane) {
    Kept optimizer;
    optimizer.state = {.tensors = {},
                       .values = {{"type", std::string("adam")}},
                       .parts = {{{"w", "exp_avg"}, {parts[static_cast<size_t>(plane.rank())]}}}};
    auto model = testing::small_model();
    ddp::Checkpointer(plane, at::kCPU, options, {model, optimizer}).save(0);
  });
}

// Each rank must find `whole`.
std::vector<std::exception_ptr> load(const ddp::CheckpointOptions& options, int ranks,
                                     const at::Tensor& whole) {
  return testing::run_ranks(ranks, [&](ddp::ControlPlane& plane) {
    Kept optimizer;
    auto model = testing::small_model();
    const auto done = ddp::Checkpointer(plane, at::kCPU, options, {model, optimizer}).restore();
    REQUIRE(done == 1);
    REQUIRE(testing::same_bits(optimizer.state.whole("state.w.exp_avg"), whole));
  });
}

void require_none(const std::vector<std::exception_ptr>& errors) {
  for (const auto& error : errors) {
    REQUIRE(error == nullptr);
  }
}

}  // namespace

TEST_CASE("a state key is a text and back, and names a slot only after state.") {
  for (const std::string text : {"w", "a.b.weight", "state.w.exp_avg", "state.a.b.weight.step",
                                 "state.w", "state..x", "state.w.", "rank_local.w", ""}) {
    INFO(text);
    CHECK(StateKey(text).text() == text);
  }
  CHECK(StateKey("state.a.b.exp_avg").parameter == "a.b");
  CHECK(StateKey("state.a.b.exp_avg").slot == "exp_avg");
  CHECK(StateKey("state.w").slot == "");
  CHECK((StateKey("w", "master") == StateKey("state.w.master")));
}

TEST_CASE("parts are joined in the order of their memory, whoever held them") {
  const bool is_turned = GENERATE(true, false);
  auto whole = torch::arange(120, at::kFloat).view({2, 3, 4, 5});
  whole = is_turned ? whole.contiguous(at::MemoryFormat::ChannelsLast) : whole;
  auto parts = cut(whole, {17, 17, 80});
  std::swap(parts[0], parts[3]);
  parts.push_back(parts[1]);  // two ranks may have the same part
  StateDict state{.tensors = {}, .values = {}, .parts = {{"w", parts}}};
  CHECK(state.contains("w"));
  CHECK(state.sizes("w") == whole.sizes());
  CHECK(at::equal(state.whole("w"), whole));
  CHECK(state.whole("w").strides() == whole.strides());
  // A rank's elements, in the order that its parameter has here.
  for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    const auto here = whole.contiguous(format);
    CHECK(
        at::equal(state.slice("w", here, 10, 100), here.as_strided({120}, {1}).narrow(0, 10, 100)));
    CHECK(state.slice("w", here, 120, 0).numel() == 0);
  }
}

TEST_CASE("an element that no part has is an error, where it is needed") {
  const auto whole = torch::arange(10, at::kFloat);
  auto parts = cut(whole, {3, 6});
  parts.erase(parts.begin() + 1);
  const StateDict state{.tensors = {}, .values = {}, .parts = {{"w", parts}}};
  CHECK_THROWS_WITH(state.whole("w"), Catch::Contains("the parts of w lack its element 3"));
  CHECK_THROWS_AS(state.require_all_parts("w"), ddp::MismatchError);
  CHECK_THROWS_AS(state.slice("w", whole, 2, 2), ddp::MismatchError);
  CHECK(at::equal(state.slice("w", whole, 6, 4), whole.narrow(0, 6, 4)));
}

TEST_CASE("entries are read as they were written, and nothing else") {
  const std::vector<StateEntry> entries{
      {"optimizer", {"a.weight", "exp_avg"}, {{2, 3, 4, 5}, {60, 1, 15, 3}, 17}},
      {"optimizer", {"a.weight", "step"}, {}},
      {"other", {"none", "master"}, {{2, 0}, {1, 1}, 0}}};
  const auto text = ddp::detail::entries_to_json(entries);
  REQUIRE((parse_entries(text, "f") == entries));
  const auto one = [](const std::string& sizes, const std::string& strides,
                      const std::string& begin) {
    return R"([{"object": "o", "parameter": "w", "slot": "s", "sizes": )" + sizes +
           ", \"strides\": " + strides + ", \"begin\": " + begin + "}]";
  };
  REQUIRE(parse_entries(one("[4, 2]", "[2, 1]", "3"), "f").size() == 1);
  for (const auto& bad :
       {one("[4, 2]", "[2, 2]", "0"), one("[4, 2]", "[2]", "0"), one("[4, 2]", "[4, 1]", "0"),
        one("[-4, 2]", "[2, 1]", "0"), one("[4, 2]", "[2, 1]", "-1"),
        one("[4, 2]", "[2, 1]", "0.5"), one("[4294967296, 4294967296]", "[4294967296, 1]", "0"),
        one("7", "[2, 1]", "0"), std::string("[{}]"), std::string("{\"a\": 1}"), std::string("["),
        std::string("[[[[[[1]]]]]]")}) {
    INFO(bad);
    CHECK_THROWS_WITH(parse_entries(bad, "f.safetensors"), Catch::StartsWith("f.safetensors "));
  }
  const StateEntry entry{"o", {"w", "s"}, {{4, 2}, {2, 1}, 3}};
  CHECK_NOTHROW(ddp::detail::require_fits(entry, torch::zeros({5}), "f"));
  CHECK_THROWS_AS(ddp::detail::require_fits(entry, torch::zeros({6}), "f"), ddp::ReadError);
  CHECK_THROWS_AS(ddp::detail::require_fits(entry, torch::zeros({1, 5}), "f"), ddp::ReadError);
}

TEST_CASE("each rank saves its parts, and any number of ranks loads them") {
  testing::TemporaryFolder folder;
  const auto options = testing::options_in(folder);
  const auto whole = torch::randn({7, 3});
  require_none(save(options, cut(whole, {5, 20})));
  const auto step = options.dir + "/step_0000000001/";
  REQUIRE(ddp::load_safetensors(step + "optimizer.rank_00001.safetensors")
              .tensors.at("optimizer.state.w.exp_avg")
              .numel() == 15);
  REQUIRE_FALSE(std::filesystem::exists(step + "optimizer.safetensors"));
  for (const int ranks : {1, 2, 4}) {
    require_none(load(options, ranks, whole));
  }
  testing::write_file(step + "optimizer.rank_00002.safetensors", "cut");
  for (const auto& error : load(options, 2, whole)) {
    CHECK_THAT(testing::message_of<ddp::ReadError>(error), Catch::Contains("none of the 1"));
  }
}

TEST_CASE("parts whose ranks had the parameter in other orders in memory are refused") {
  testing::TemporaryFolder folder;
  const auto options = testing::options_in(folder);
  const auto whole = torch::randn({7, 1, 3});
  auto parts = cut(whole, {5, 20});
  parts[1].slice.strides[1] = 1;  // a stride of one element says nothing
  const bool is_turned = GENERATE(true, false);
  if (is_turned) {
    parts[1].slice.strides = {1, 7, 7};
  }
  require_none(save(options, parts));
  const auto errors = load(options, 2, whole);
  if (!is_turned) {
    require_none(errors);
  }
  for (std::size_t rank = 0; is_turned && rank < errors.size(); ++rank) {
    CHECK_THAT(testing::message_of<ddp::ReadError>(errors[rank]),
               Catch::Contains("w.exp_avg has other sizes, or another order in memory"));
  }
}
