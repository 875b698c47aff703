// SPDX-License-Identifier: Apache-2.0
// A TensorBoard event file. The input holds pieces of one byte of length and as many bytes, which
// become records with the right checksums. After a piece of length 0 the bytes are the file's own.
#include "fuzz/fuzz.hpp"
#include "train/metrics/files/tensorboard_events.hpp"

namespace tensorboard = ddp::detail::tensorboard;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  std::string file;
  auto rest = fuzz::view(data, size);
  while (!rest.empty() && rest.front() != '\0') {
    const auto length = static_cast<unsigned char>(rest.front());
    file += tensorboard::framed(rest.substr(1, length));
    rest.remove_prefix(std::min<std::size_t>(rest.size(), std::size_t{1} + length));
  }
  file += rest.substr(rest.empty() ? 0 : 1);
  const auto all = tensorboard::records_before(file, INT64_MAX);
  const auto few = tensorboard::records_before(file, 5);
  fuzz::require(few.size() <= all.size() && all.size() <= file.size(), "records are only removed");
  fuzz::require(tensorboard::records_before(all, INT64_MAX) == all, "kept records are kept again");
  fuzz::require(tensorboard::records_before(all, 5) == few, "damage at the end changes nothing");
  return 0;
}
