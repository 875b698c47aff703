// SPDX-License-Identifier: Apache-2.0
// Exchanges among some ranks: rank 0 collects the values of a key and sends all of them to the
// contributors.
#include <utility>

#include "core/byte_codec.hpp"
#include "core/control_hub.hpp"
#include "core/control_leaf.hpp"
#include "core/unwinding.hpp"

namespace ddp::detail {
namespace {

constexpr std::chrono::milliseconds kExchangeLook{100};

std::string encode_values(const std::map<int, std::string>& values) {
  ByteWriter writer;
  writer.number(static_cast<uint32_t>(values.size()));
  for (const auto& [rank, value] : values) {
    writer.number(static_cast<uint32_t>(rank)).text(value);
  }
  return writer.take();
}

std::map<int, std::string> decode_values(ByteReader& reader) {
  std::map<int, std::string> values;
  for (auto left = reader.number<uint32_t>(); left > 0 && reader.ok(); --left) {
    const auto rank = static_cast<int>(reader.number<uint32_t>());
    values[rank] = reader.text();
  }
  return values;
}

}  // namespace

std::map<int, std::string> ControlPlaneBase::exchange(uint64_t key, int num_ranks,
                                                      const std::string& value,
                                                      const std::function<void()>& look) {
  refuse_while_unwinding("an exchange among ranks");
  std::unique_lock lock(mutex_);
  if (failure_.failed()) {
    throw_failure(failure_.get());
  }
  send_exchange(key, static_cast<uint32_t>(num_ranks), value.substr(0, kMaxExchangeBytes));
  while (
      !wait_until(lock, clock_.now() + kExchangeLook, [&] { return exchanged_.contains(key); })) {
    lock.unlock();
    look();
    lock.lock();
  }
  return std::move(exchanged_.extract(key).mapped());
}

void ControlPlaneBase::keep_exchanged(uint64_t key, std::map<int, std::string> values) {
  exchanged_[key] = std::move(values);
  changed_.notify_all();
}

void ControlLeaf::send_exchange(uint64_t key, uint32_t num_ranks, const std::string& value) {
  ByteWriter writer;
  send(FrameType::Exchange, writer.number(key).number(num_ranks).text(value).take());
}

void ControlLeaf::handle_exchanged(const Frame& frame) {
  ByteReader reader(frame.payload);
  const auto key = reader.number<uint64_t>();
  auto values = decode_values(reader);
  if (reader.finished()) {
    keep_exchanged(key, std::move(values));
  }
}

void ControlHub::send_exchange(uint64_t key, uint32_t num_ranks, const std::string& value) {
  note_exchange(0, key, num_ranks, value);
}

void ControlHub::handle_exchange(int rank, const Frame& frame) {
  ByteReader reader(frame.payload);
  const auto key = reader.number<uint64_t>();
  const auto num_ranks = reader.number<uint32_t>();
  const auto value = reader.text();
  if (reader.finished() && value.size() <= kMaxExchangeBytes) {
    note_exchange(rank, key, num_ranks, value);
  }
}

void ControlHub::note_exchange(int rank, uint64_t key, uint32_t num_ranks,
                               const std::string& value) {
  auto& values = exchanges_[key];
  values[rank] = value;
  if (values.size() < num_ranks) {
    return;
  }
  const auto complete = std::move(exchanges_.extract(key).mapped());
  ByteWriter writer;
  const auto payload = writer.number(key).raw(encode_values(complete)).take();
  for (const auto& entry : complete) {
    auto& peer = peers_[static_cast<std::size_t>(entry.first)];
    if (peer.channel) {
      peer.channel->queue(FrameType::Exchanged, payload);
      if (peer.channel->flush() == IoStatus::WouldBlock) {
        wake_.notify();
      }
    }
  }
  if (complete.contains(0)) {
    keep_exchanged(key, complete);
  }
}

}  // namespace ddp::detail
