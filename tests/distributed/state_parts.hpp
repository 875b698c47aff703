// SPDX-License-Identifier: Apache-2.0
// Joins a divided state, of which each rank has its parts.
#pragma once

#include <ATen/Functions.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "core/control/wire/message_codec.hpp"
#include "ddp/core/state_dict.hpp"
#include "distributed/ddp_test_utils.hpp"

namespace ddp::test {

// A part of float32 state, sent to the other ranks.
struct SentPart {
  std::string key;
  StateSlice slice;
  std::string bytes;
  friend auto message_fields(SentPart& part) {
    return std::tie(part.key, part.slice.sizes, part.slice.strides, part.slice.begin, part.bytes);
  }
};
struct SentParts {
  std::vector<SentPart> parts;
  friend auto message_fields(SentParts& sent) { return std::tie(sent.parts); }
};

// With the parts of all ranks. Collective.
inline StateDict with_all_parts(const StateDict& state) {
  SentParts mine;
  for (const auto& [key, parts] : state.parts) {
    for (const auto& part : parts) {
      const auto values = part.tensor.to(at::kCPU, at::kFloat).contiguous();
      mine.parts.push_back({key.text(), part.slice,
                            std::string(static_cast<const char*>(values.const_data_ptr()),
                                        static_cast<size_t>(values.nbytes()))});
    }
  }
  StateDict result{.tensors = state.tensors, .values = state.values};
  for (const auto& sent : detail::all_gather_messages(context().control_plane(), mine)) {
    for (const auto& part : sent.parts) {
      const auto numel = static_cast<int64_t>(part.bytes.size() / sizeof(float));
      auto values = at::empty({numel});
      std::copy(part.bytes.begin(), part.bytes.end(),
                static_cast<char*>(values.mutable_data_ptr()));
      result.parts[part.key].push_back({part.slice, values});
    }
  }
  return result;
}

// A copy of the complete state. Collective.
inline StateDict copy_of(const StateDict& state) {
  const StateDict divided = with_all_parts(state);
  StateDict copy{.tensors = {}, .values = state.values};
  for (const auto& [key, tensor] : divided.tensors) {
    copy.tensors[key] = tensor.clone();
  }
  for (const auto& [key, parts] : divided.parts) {
    copy.tensors[key] = divided.whole(key);
  }
  return copy;
}

}  // namespace ddp::test
