// SPDX-License-Identifier: Apache-2.0
// The list of a file's divided tensors, and parts of small tensors by its entries.
#include <ATen/ATen.h>

#include <algorithm>

#include "fuzz/fuzz.hpp"
#include "train/checkpoint/state_entry.hpp"

namespace {

using ddp::detail::StateEntry;

// Of small tensors only; -1: too many elements.
int64_t numel_of(const std::vector<int64_t>& sizes) {
  int64_t numel = 1;
  for (const auto size : sizes) {
    if (size > 64 || numel > 4096) {
      return -1;
    }
    numel *= size;
  }
  return numel;
}

// Any part that fits can be read again; a whole tensor is there once all its elements are.
void read_parts(const std::vector<StateEntry>& entries) {
  ddp::StateDict state;
  for (const auto& entry : entries) {
    const auto numel = numel_of(entry.slice.sizes);
    const auto length = std::clamp<int64_t>(numel - entry.slice.begin, 0, 16);
    const auto tensor = at::arange(length, at::kFloat);
    if (numel < 0 || !fuzz::accepts([&] { require_fits(entry, tensor, "file"); })) {
      continue;
    }
    auto& parts = state.parts[entry.key];
    if (parts.empty() || ddp::detail::same_order(parts.front().slice, entry.slice)) {
      parts.push_back({entry.slice, tensor});
    }
  }
  for (const auto& part : state.parts) {
    const auto& key = part.first;
    const auto& first = part.second.front();
    const auto& sizes = first.slice.sizes;
    const auto like = at::empty(sizes);
    const auto complete = fuzz::accepts([&] { state.require_all_parts(key); });
    const auto joined =
        fuzz::accepts([&] { fuzz::require(state.whole(key).sizes() == sizes, "sizes"); });
    fuzz::require(complete == joined, "a tensor is whole if all parts are there");
    (void)fuzz::accepts([&] {
      const auto read = state.slice(key, like, first.slice.begin, first.tensor.numel());
      fuzz::require(read.numel() == first.tensor.numel(), "a slice has the asked elements");
    });
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  (void)fuzz::accepts([&] {
    const auto entries = ddp::detail::parse_entries(fuzz::view(data, size), "file");
    const auto written = ddp::detail::entries_to_json(entries);
    const auto again = fuzz::read_back([&] { return ddp::detail::parse_entries(written, "file"); });
    fuzz::require(again == entries, "the list is read back");
    read_parts(entries);
  });
  return 0;
}
