// SPDX-License-Identifier: Apache-2.0
// The index of a checkpoint in several files. The file a.safetensors beside it holds the tensors
// "x" and "y", and so does one in the folder above.
#include "core/files/safetensors_header.hpp"
#include "fuzz/fuzz.hpp"
#include "pretrained/stored_weights.hpp"

namespace {

void write_shard() {
  std::vector<ddp::detail::SafetensorsEntry> entries{{.name = "x", .dtype = "F32", .shape = {2}},
                                                     {.name = "y", .dtype = "BF16", .shape = {}}};
  const auto file = ddp::detail::make_safetensors_header(entries, {}) + std::string(10, '\0');
  std::filesystem::create_directories(fuzz::folder() / "model");
  fuzz::write_file("a.safetensors", file);
  fuzz::write_file("model/a.safetensors", file);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  static const bool is_written = (write_shard(), true);
  const auto path = fuzz::write_file("model/model.safetensors.index.json", fuzz::view(data, size));
  (void)fuzz::accepts([&] {
    const auto stored = models::detail::open_stored_weights(path);
    fuzz::require(stored.tensors.size() <= 2 && is_written, "all tensors are those of the shard");
    for (const auto& file : stored.files) {
      fuzz::require(std::filesystem::path(file).parent_path() == fuzz::folder() / "model",
                    "shards lie beside the index");
    }
  });
  return 0;
}
