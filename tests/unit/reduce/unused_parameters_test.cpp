// SPDX-License-Identifier: Apache-2.0
#include "reduce/unused_parameters.hpp"

#include <ATen/ATen.h>

#include <memory>

#include "fake_communicator.hpp"
#include "support/catch.hpp"

using ddp::detail::UnusedParameters;
using Used = std::vector<bool>;

namespace {

/// One synchronised backward in which these parameters get gradients.
Used run_pass(UnusedParameters& unused, const std::vector<int>& parameters, bool is_first) {
  for (const int parameter : parameters) {
    unused.mark_used(parameter);
  }
  unused.start_map();
  const auto used = unused.finish_map();
  unused.end_pass(is_first);
  return used;
}

}  // namespace

TEST_CASE("a group of one knows its own used parameters") {
  UnusedParameters unused(ddp::make_single_communicator(at::kCPU), {.find_unused_parameters = true},
                          3);
  CHECK(unused.reads_map());
  CHECK(run_pass(unused, {0, 2}, true) == Used{true, false, true});
  CHECK(unused.num_unused() == 1);
  CHECK(run_pass(unused, {}, false) == Used{false, false, false});
  CHECK(unused.num_unused() == 3);
}

TEST_CASE("without find_unused_parameters no map is read") {
  const auto communicator = std::make_shared<testing::FakeCommunicator>();
  UnusedParameters unused(communicator, {}, 2);
  CHECK_FALSE(unused.reads_map());
  CHECK(run_pass(unused, {0}, true) == Used{true, false});
  CHECK(unused.num_unused() == 1);
  CHECK(communicator->calls.empty());
}

TEST_CASE("a parameter that another rank used counts as used") {
  const auto communicator = std::make_shared<testing::FakeCommunicator>();
  communicator->other_rank = [](const at::Tensor&) {
    return at::tensor(std::vector<int>{1, 1, 0}, at::kInt);
  };
  UnusedParameters unused(communicator, {.find_unused_parameters = true}, 3);
  CHECK(run_pass(unused, {0}, true) == Used{true, true, false});
  CHECK(unused.num_unused() == 2);  // on this rank
}

TEST_CASE("a static graph reads the map once") {
  const auto communicator = std::make_shared<testing::FakeCommunicator>();
  UnusedParameters unused(communicator, {.static_graph = true}, 2);
  CHECK(run_pass(unused, {1}, true) == Used{false, true});
  CHECK_FALSE(unused.reads_map());
  CHECK(run_pass(unused, {0, 1}, false) == Used{false, true});
  CHECK(communicator->calls.size() == 1);
}

TEST_CASE("gradients of local backwards count for the next synchronised one") {
  UnusedParameters unused(ddp::make_single_communicator(at::kCPU), {.find_unused_parameters = true},
                          2);
  unused.mark_used(0);
  CHECK(run_pass(unused, {1}, true) == Used{true, true});
  unused.mark_used(0);
  unused.forget_used();
  CHECK(run_pass(unused, {1}, false) == Used{false, true});
}

TEST_CASE("a set of unused parameters that changes is noticed") {
  UnusedParameters unused(ddp::make_single_communicator(at::kCPU), {}, 2);
  run_pass(unused, {0}, true);
  CHECK_FALSE(unused.set_changed());
  run_pass(unused, {0}, false);
  CHECK_FALSE(unused.set_changed());
  run_pass(unused, {1}, false);
  CHECK(unused.set_changed());
  run_pass(unused, {1}, false);
  CHECK(unused.set_changed());
}

TEST_CASE("a restored history knows nothing of the undone backward") {
  UnusedParameters unused(ddp::make_single_communicator(at::kCPU), {.static_graph = true}, 2);
  const auto before = unused.history();
  run_pass(unused, {0}, true);
  unused.set_history(before);
  CHECK(unused.reads_map());
  CHECK(unused.num_unused() == 0);
  CHECK(run_pass(unused, {1}, true) == Used{false, true});
}
