// SPDX-License-Identifier: Apache-2.0
// A checkpoint's manifest: the text without its end, which is added with the right checksum, and
// the text as it is.
#include <cmath>
#include <cstdio>

#include "fuzz/fuzz.hpp"
#include "train/checkpoint/manifest.hpp"

namespace {

void read_manifest(const std::string& text) {
  const auto manifest = ddp::detail::parse_manifest(text, "manifest.json");
  const auto written = ddp::detail::manifest_to_json(manifest);
  const auto again =
      fuzz::read_back([&] { return ddp::detail::parse_manifest(written, "manifest.json"); });
  // Compares texts, because a NaN differs from itself.
  fuzz::require(ddp::detail::manifest_to_json(again) == written, "a manifest is read back");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  const std::string text(fuzz::view(data, size));
  char checksum[17];
  std::snprintf(checksum, sizeof checksum, "%016llx",
                static_cast<unsigned long long>(ddp::xxh3(text)));
  (void)fuzz::accepts(
      [&] { read_manifest(text + ",\n\"manifest_xxh3\": \"" + checksum + "\"\n}\n"); });
  (void)fuzz::accepts([&] { read_manifest(text); });
  return 0;
}
