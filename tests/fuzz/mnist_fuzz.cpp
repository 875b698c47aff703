// SPDX-License-Identifier: Apache-2.0
// Files of MNIST, compressed or not. The first byte is the length of the labels' file, which comes
// before the images' file.
#include "data/sources/image_source.hpp"
#include "fuzz/fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  if (size == 0) {
    return 0;
  }
  const auto input = fuzz::view(data + 1, size - 1);
  const auto num_labels = std::min<std::size_t>(data[0], input.size());
  fuzz::write_file("train-labels-idx1-ubyte", input.substr(0, num_labels));
  fuzz::write_file("train-images-idx3-ubyte", input.substr(num_labels));
  (void)fuzz::accepts([&] {
    const auto images = ddp::detail::read_mnist(fuzz::folder().string(), ddp::Split::Train);
    fuzz::require(images.pixels.size() == images.labels.size() * 28 * 28 * 3, "images have labels");
    for (const int64_t label : images.labels) {
      fuzz::require(label >= 0 && label < 10, "labels are digits");
    }
  });
  return 0;
}
