// SPDX-License-Identifier: Apache-2.0
// An array of NumPy. An input that begins with "{" is a header of one line and then the data; any
// other is the file.
#include <ATen/ATen.h>

#include "ddp/data/tensor_dataset.hpp"
#include "fuzz/fuzz.hpp"

namespace {

std::string npy_file(std::string_view input) {
  if (!input.starts_with('{')) {
    return std::string(input);
  }
  const auto end = std::min(input.find('\n'), input.size() - 1) + 1;
  std::string file("\x93NUMPY\x02\x00", 8);
  for (int shift = 0; shift < 32; shift += 8) {
    file += static_cast<char>(end >> shift & 0xff);
  }
  return file.append(input);
}

// The reader's other refusals hide one of every file.
bool accepts_good_file() {
  const std::string header = "{'descr': '<i8', 'fortran_order': False, 'shape': (1,), }\n";
  const auto path = fuzz::write_file("good.npy", npy_file(header + std::string(8, '\0')));
  return fuzz::read_back([&] { return ddp::load_npy(path); }).numel() == 1;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  static const bool works = accepts_good_file();
  fuzz::require(works, "a good file is accepted");
  const auto file = npy_file(fuzz::view(data, size));
  const auto path = fuzz::write_file("input.npy", file);
  (void)fuzz::accepts([&] {
    const auto array = ddp::load_npy(path);
    const auto byte = [&](std::size_t i) { return std::size_t{static_cast<uint8_t>(file[i])}; };
    const std::size_t header = file[6] == 1 ? 10 + byte(8) + (byte(9) << 8)
                                            : 12 + byte(8) + (byte(9) << 8) + (byte(10) << 16);
    fuzz::require(header + array.nbytes() == file.size(), "the array is the file's data");
    (void)array.clone();
  });
  return 0;
}
