// SPDX-License-Identifier: Apache-2.0
#include "core/control_messages.hpp"

#include "core/byte_codec.hpp"
#include "core/control_channel.hpp"
#include "core/group_exchange.hpp"

namespace ddp::detail {
namespace {

constexpr std::size_t kMaxActivityBytes = 64;

}  // namespace

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

std::string encode_contribution(const Contribution& contribution) {
  ByteWriter writer;
  writer.number(contribution.sequence).number(static_cast<uint8_t>(contribution.kind));
  writer.number(contribution.root).text(contribution.activity.substr(0, kMaxActivityBytes));
  return writer.text(contribution.value).take();
}

bool decode_contribution(std::string_view bytes, Contribution& contribution) {
  ByteReader reader(bytes);
  contribution.sequence = reader.number<uint64_t>();
  const auto kind = reader.number<uint8_t>();
  contribution.kind = static_cast<CollectiveKind>(kind);
  contribution.root = reader.number<uint32_t>();
  contribution.activity = reader.text();
  contribution.value = reader.text();
  return reader.finished() && kind <= static_cast<uint8_t>(CollectiveKind::Close);
}

std::vector<std::string> encode_result(uint64_t sequence,
                                       const std::vector<std::string_view>& values) {
  std::vector<std::string> messages;
  std::size_t next = 0;
  do {
    ByteWriter writer;
    writer.number(sequence).number(static_cast<uint32_t>(next));
    writer.number(static_cast<uint32_t>(values.size()));
    std::size_t num_bytes = 16;
    while (next < values.size() && num_bytes + 4 + values[next].size() <= kMaxPayloadBytes) {
      num_bytes += 4 + values[next].size();
      writer.text(values[next++]);
    }
    messages.push_back(writer.take());
  } while (next < values.size());
  return messages;
}

bool decode_result(std::string_view bytes, uint32_t world_size, ResultPart& part) {
  ByteReader reader(bytes);
  part.sequence = reader.number<uint64_t>();
  part.first = reader.number<uint32_t>();
  part.num_values = reader.number<uint32_t>();
  part.values.clear();
  while (reader.ok() && !reader.finished()) {
    part.values.push_back(reader.text());
  }
  return reader.ok() && part.num_values <= world_size && part.first <= part.num_values &&
         part.values.size() <= part.num_values - part.first;
}

std::string encode_exchange(const ExchangeValue& value) {
  ByteWriter writer;
  return writer.number(value.key).number(value.num_ranks).text(value.value).take();
}

bool decode_exchange(std::string_view bytes, ExchangeValue& value) {
  ByteReader reader(bytes);
  value.key = reader.number<uint64_t>();
  value.num_ranks = reader.number<uint32_t>();
  value.value = reader.text();
  return reader.finished() && value.value.size() <= GroupExchange::kMaxExchangeBytes;
}

std::string encode_exchanged(const ExchangeResult& result) {
  ByteWriter writer;
  writer.number(result.key).number(static_cast<uint32_t>(result.values.size()));
  for (const auto& [rank, value] : result.values) {
    writer.number(static_cast<uint32_t>(rank)).text(value);
  }
  return writer.take();
}

bool decode_exchanged(std::string_view bytes, ExchangeResult& result) {
  ByteReader reader(bytes);
  result.key = reader.number<uint64_t>();
  result.values.clear();
  for (auto left = reader.number<uint32_t>(); left > 0 && reader.ok(); --left) {
    const auto rank = static_cast<int>(reader.number<uint32_t>());
    result.values[rank] = reader.text();
  }
  return reader.finished();
}

}  // namespace ddp::detail
