// SPDX-License-Identifier: Apache-2.0
// DDP_TEST_DETERMINISTIC=1 enables PyTorch's deterministic algorithms for the whole program, so
// that no call is selected by measured time. Under a sanitizer those measurements take most of the
// time, or all of the memory.
#include <ATen/Context.h>

#include <cstdlib>
#include <string_view>

namespace {

[[maybe_unused]] const bool deterministic = [] {
  const char* wanted = std::getenv("DDP_TEST_DETERMINISTIC");
  const bool set = wanted != nullptr && std::string_view(wanted) == "1";
  if (set) {
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  }
  return set;
}();

}  // namespace
