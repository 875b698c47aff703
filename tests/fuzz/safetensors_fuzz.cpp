// SPDX-License-Identifier: Apache-2.0
// A safetensors file (safetensors_case.hpp): its header, its list of tensors, and the tensors.
#include <ATen/ATen.h>

#include "core/files/safetensors_header.hpp"
#include "ddp/core/safetensors.hpp"
#include "ddp/detail/list_safetensors.hpp"
#include "fuzz/fuzz.hpp"
#include "fuzz/safetensors_case.hpp"

namespace {

bool have_equal_bytes(const at::Tensor& one, const at::Tensor& other) {
  return one.scalar_type() == other.scalar_type() && one.sizes() == other.sizes() &&
         std::string_view(static_cast<const char*>(one.const_data_ptr()), one.nbytes()) ==
             std::string_view(static_cast<const char*>(other.const_data_ptr()), other.nbytes());
}

void read_tensors(const std::string& path) {
  const auto file = ddp::load_safetensors(path);
  const auto list = ddp::list_safetensors(path);
  fuzz::require(list.size() == file.tensors.size(), "the list has all tensors");
  for (const auto& entry : list) {
    const auto& tensor = file.tensors.at(entry.name);
    fuzz::require(
        tensor.sizes() == at::IntArrayRef(entry.shape) && tensor.nbytes() == entry.num_bytes,
        "the list describes the tensors");
  }
  const auto copy = (fuzz::folder() / "copy.safetensors").string();
  ddp::save_safetensors(copy, file.tensors, file.metadata);
  const auto again = fuzz::read_back([&] { return ddp::load_safetensors(copy); });
  fuzz::require(again.metadata == file.metadata && again.tensors.size() == file.tensors.size(),
                "all is read back");
  for (const auto& [name, tensor] : file.tensors) {
    fuzz::require(have_equal_bytes(again.tensors.at(name), tensor), "tensors are read back");
  }
}

// Without the file: any data behind the header.
void read_header(std::string_view json, uint64_t file_size) {
  auto header = ddp::detail::parse_safetensors_header(json, file_size, "input");
  const auto written = ddp::detail::make_safetensors_header(header.entries, header.metadata);
  const auto again = fuzz::read_back([&] {
    return ddp::detail::parse_safetensors_header(
        std::string_view(written).substr(8), written.size() + file_size - 8 - json.size(), "again");
  });
  fuzz::require(again.entries.size() == header.entries.size(), "a header is read back");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  const auto file = fuzz::safetensors_file(fuzz::view(data, size));
  if (file.size() > 8) {
    const auto json = std::string_view(file).substr(8);
    for (const uint64_t data_bytes : {0, 4, 24, 4096}) {
      (void)fuzz::accepts([&] { read_header(json, 8 + json.size() + data_bytes); });
    }
  }
  const auto path = fuzz::write_file("input.safetensors", file);
  (void)fuzz::accepts([&] { read_tensors(path); });
  return 0;
}
