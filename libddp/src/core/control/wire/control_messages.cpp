// SPDX-License-Identifier: Apache-2.0
#include "core/control/wire/control_messages.hpp"

#include "core/control/wire/control_channel.hpp"
#include "core/control/wire/message_codec.hpp"

namespace ddp::detail {

const char* to_string(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::Broadcast:
      return "broadcast";
    case CollectiveKind::AllGather:
      return "all_gather";
    case CollectiveKind::Gather:
      return "gather";
    case CollectiveKind::Barrier:
      return "barrier";
    case CollectiveKind::Close:
      return "close";
  }
  return "?";
}

std::vector<std::string> encode_result(uint64_t sequence, const std::vector<std::string>& values) {
  const std::size_t num_other_bytes = encode_message(ResultPart{}).size();
  std::vector<std::string> messages;
  std::size_t next = 0;
  do {
    ResultPart part{
        sequence, static_cast<uint32_t>(next), static_cast<uint32_t>(values.size()), {}};
    std::size_t num_bytes = num_other_bytes;
    while (next < values.size() && num_bytes + 4 + values[next].size() <= kMaxPayloadBytes) {
      num_bytes += 4 + values[next].size();
      part.values.push_back(values[next++]);
    }
    messages.push_back(encode_message(part));
  } while (next < values.size());
  return messages;
}

}  // namespace ddp::detail
