// SPDX-License-Identifier: Apache-2.0
#include "reduce/model/replica_check.hpp"

#include "ddp/core/error.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "unit/reduce/fake_communicator.hpp"

using namespace ddp;
using namespace ddp::detail;
using Groups = std::vector<std::vector<int>>;

TEST_CASE("differences are found by tensor, with the largest group of ranks first") {
  const auto all = find_differences({{5, 1, 7, 3}, {5, 2, 7, 4}, {5, 1, 8, 5}, {5, 2, 7, 6}});
  REQUIRE(all.size() == 3);
  CHECK(all[0].tensor == 1);
  CHECK(all[0].groups == Groups{{0, 2}, {1, 3}});
  CHECK_FALSE(all[0].has_majority(4));
  CHECK(all[1].tensor == 2);
  CHECK(all[1].groups == Groups{{0, 1, 3}, {2}});
  CHECK(all[1].has_majority(4));
  CHECK(all[2].groups == Groups{{0}, {1}, {2}, {3}});
  CHECK(find_differences({{1, 2}, {1, 2}}).empty());
}

TEST_CASE("a difference names the minority, or all groups") {
  const auto text = [](Groups groups, int world_size, std::vector<std::string> hosts = {}) {
    return describe_difference("parameter w", {.tensor = 0, .groups = std::move(groups)},
                               {.world_size = world_size, .hosts = std::move(hosts)});
  };
  const std::vector<std::string> hosts{"a", "a", "b", "b", "c"};
  CHECK(text({{0, 2, 3}, {1}}, 4, hosts) ==
        "parameter w differs on rank 1 (a) from the other 3 ranks");
  CHECK(text({{1, 2, 4}, {3}, {0}}, 5, hosts) ==
        "parameter w differs on ranks 0, 3 from the other 3 ranks");
  CHECK(text({{0}, {1}}, 2, hosts) == "parameter w differs between rank 0 (a) and rank 1 (a)");
  CHECK(text({{0, 3}, {1, 2}}, 4, hosts) ==
        "parameter w differs between ranks 0, 3 and ranks 1, 2");
  // A group of split() has its own ranks and no hosts.
  CHECK(text({{0, 1}, {2}}, 3) ==
        "parameter w differs on rank 2 of its group from the other 2 ranks");
  CHECK(text({{0}, {1}, {2, 3}}, 4) ==
        "parameter w differs between rank 0 of its group, rank 1 of its group and ranks 2, 3 of "
        "their group");
}

TEST_CASE("a check is made only where replicas exist, and two are not repaired") {
  const auto two = std::make_shared<::testing::FakeCommunicator>();
  const auto make = [&](const CommunicatorPtr& communicator, const DdpOptions& options) {
    return make_replica_check({}, communicator, options, "");
  };
  DdpOptions options;
  options.desync_policy = DesyncPolicy::Repair;
  CHECK(make(two, options) == nullptr);
  options.desync_check_every = 4;
  CHECK(make(make_single_communicator(at::kCPU), options) == nullptr);
  CHECK(::testing::message_of<SettingsError>([&] { make(two, options); }).find("3 ranks") !=
        std::string::npos);
  options.desync_policy = DesyncPolicy::Warn;
  const auto check = make(two, options);
  REQUIRE(check != nullptr);
  CHECK(check->is_due(4));
  CHECK(check->is_due(8));
  CHECK_FALSE(check->is_due(1));
  options.desync_check_every = -1;
  CHECK(::testing::message_of<SettingsError>([&] { make(two, options); }).find("0 or more") !=
        std::string::npos);
}
