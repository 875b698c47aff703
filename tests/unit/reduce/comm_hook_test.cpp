// SPDX-License-Identifier: Apache-2.0
#include "reduce/hooks/comm_hook_table.hpp"

#include "support/catch.hpp"

using ddp::DdpOptions;
using ddp::detail::comm_hook_names;
using ddp::detail::make_comm_hook;

TEST_CASE("every value of ddp.comm_hook makes the hook of that name") {
  REQUIRE(comm_hook_names().front().first == "none");
  for (const auto& [name, type] : comm_hook_names()) {
    CAPTURE(name);
    if (const auto hook = make_comm_hook(DdpOptions{.comm_hook = type})) {
      CHECK(hook->name().substr(0, name.size()) == name);  // PowerSGD adds its settings
    } else {
      CHECK(name == "none");
    }
  }
}
