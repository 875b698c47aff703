// SPDX-License-Identifier: Apache-2.0
// Compares with torch.optim in Python: tests/golden/make_optimizer_golden.py.
#include "unit/optim/optimizer_golden.hpp"

using namespace optim_test;
using ddp::OptimizerImplementation;

TEST_CASE("SGD, Adam and AdamW take torch.optim's 100 steps", "[optim]") {
  const nlohmann::json golden = read_golden("optimizer_golden.json");
  REQUIRE(golden["cases"].size() == 9);
  for (const auto& [name, golden_case] : golden["cases"].items()) {
    DYNAMIC_SECTION(name) {
      check_golden_case(name, golden_case, {});
    }
    DYNAMIC_SECTION(name << ", channels_last weight") {
      check_golden_case(name, golden_case, {.channels_last = true});
    }
    DYNAMIC_SECTION(name << ", lr as a tensor") {
      check_golden_case(name, golden_case, {.lr_on_device = true});
    }
    if (can_be_flat(golden_case)) {
      DYNAMIC_SECTION(name << ", flat") {
        check_golden_case(name, golden_case, {.implementation = OptimizerImplementation::Flat});
      }
      DYNAMIC_SECTION(name << ", flat, channels_last weight, lr as a tensor") {
        check_golden_case(name, golden_case,
                          {.implementation = OptimizerImplementation::Flat,
                           .channels_last = true,
                           .lr_on_device = true});
      }
    }
  }
}
