// SPDX-License-Identifier: Apache-2.0
#include "reduce/comm_hook_table.hpp"

#include "ddp/core/error.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"

using ddp::DdpOptions;
using ddp::detail::comm_hook_names;
using ddp::detail::make_comm_hook;

TEST_CASE("every value of ddp.comm_hook makes the hook of that name") {
  REQUIRE(comm_hook_names().front() == "none");
  REQUIRE(make_comm_hook(DdpOptions{.comm_hook = "none"}) == nullptr);
  for (const auto& name : comm_hook_names()) {
    CAPTURE(name);
    if (const auto hook = make_comm_hook(DdpOptions{.comm_hook = name})) {
      CHECK(hook->name().substr(0, name.size()) == name);  // PowerSGD adds its settings
    } else {
      CHECK(name == "none");
    }
  }
}

TEST_CASE("an unknown ddp.comm_hook is refused with the known names") {
  CHECK_THAT(testing::message_of<ddp::SettingsError>(
                 [] { make_comm_hook(DdpOptions{.comm_hook = "int4"}); }),
             Catch::Contains("ddp.comm_hook=int4 is unknown; fix: use one of none, all_reduce"));
}
