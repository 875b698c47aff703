// SPDX-License-Identifier: Apache-2.0
// PEFT's adapter_config.json.
#include "fuzz/fuzz.hpp"
#include "pretrained/adapter_config.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  const auto path = fuzz::write_file("adapter_config.json", fuzz::view(data, size));
  (void)fuzz::accepts([&] {
    const auto written =
        models::detail::adapter_config_json(models::detail::read_adapter_config(path));
    const auto again_path = fuzz::write_file("again.json", written);
    const auto again =
        fuzz::read_back([&] { return models::detail::read_adapter_config(again_path); });
    fuzz::require(models::detail::adapter_config_json(again) == written, "a config is read back");
  });
  return 0;
}
