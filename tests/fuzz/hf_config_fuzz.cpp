// SPDX-License-Identifier: Apache-2.0
// Hugging Face's config.json.
#include "fuzz/fuzz.hpp"
#include "models/pretrained/hf_config.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  const auto path = fuzz::write_file("config.json", fuzz::view(data, size));
  (void)fuzz::accepts([&] {
    const auto written = models::hf_config_json(models::read_hf_config(path));
    const auto again_path = fuzz::write_file("again.json", written);
    const auto again = fuzz::read_back([&] { return models::read_hf_config(again_path); });
    fuzz::require(models::hf_config_json(again) == written, "a config is read back");
  });
  return 0;
}
