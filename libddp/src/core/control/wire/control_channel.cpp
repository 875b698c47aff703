// SPDX-License-Identifier: Apache-2.0
#include "core/control/wire/control_channel.hpp"

#include <algorithm>
#include <stdexcept>

#include "core/control/wire/authentication.hpp"
#include "core/control/wire/message_codec.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/check.hpp"

namespace ddp::detail {
namespace {

constexpr std::size_t kHeaderBytes = 4 + 1 + 8 + 8;
// 4 MiB. A peer that never stops sending must not keep the receiver in one call.
constexpr int kReadsPerCall = 256;

std::string hello_mac(const std::string& secret, std::string_view nonce, std::string_view hello) {
  return hmac_sha256(secret, concat("hello", nonce, hello));
}

std::string session_key(const std::string& secret, std::string_view hub, std::string_view leaf) {
  return hmac_sha256(secret, concat("session", hub, leaf));
}

}  // namespace

std::string describe_invalid(const Frame& frame) {
  return concat("sent a message of type ", static_cast<int>(frame.type), " with ",
                frame.payload.size(), " bytes that is not valid");
}

ControlChannel::ControlChannel(UniqueFd fd, Side side, std::string key, uint64_t generation)
    : fd_(std::move(fd)), side_(side), session_key_(std::move(key)), generation_(generation) {}

std::string ControlChannel::mac_of(Side sender, std::string_view bytes) const {
  std::string text(1, sender == Side::Hub ? 'h' : 'l');
  return hmac_sha256(session_key_, text.append(bytes));
}

void ControlChannel::queue(FrameType type, std::string_view payload) {
  DDP_CHECK(payload.size() <= kMaxPayloadBytes);
  ByteWriter writer;
  writer.number(static_cast<uint32_t>(payload.size())).number(static_cast<uint8_t>(type));
  writer.number(generation_).number(num_sent_++).raw(payload);
  const std::string frame = writer.take();
  outgoing_ += frame;
  outgoing_ += mac_of(side_, frame);
}

IoStatus ControlChannel::flush() {
  if (!fd_.valid()) {
    return IoStatus::Closed;
  }
  return outgoing_.empty() ? IoStatus::Done : write_some(fd_.get(), outgoing_);
}

IoStatus ControlChannel::receive(std::vector<Frame>& frames) {
  for (int reads = 0; reads < kReadsPerCall; ++reads) {
    const IoStatus status = read_some(fd_.get(), incoming_, kMaxPayloadBytes);
    while (problem_.empty() && take_frame(frames)) {
    }
    if (!problem_.empty()) {
      return IoStatus::Closed;
    }
    if (status != IoStatus::Done) {
      return status;
    }
  }
  return IoStatus::Done;
}

std::string ControlChannel::why_closed() const {
  return problem_.empty()
             ? "its connection closed without a message (killed, crashed, or its host failed)"
             : problem_;
}

bool ControlChannel::take_frame(std::vector<Frame>& frames) {
  if (incoming_.size() < kHeaderBytes) {
    return false;
  }
  ByteReader header(incoming_);
  const auto length = header.number<uint32_t>();
  const auto type = header.number<uint8_t>();
  const auto generation = header.number<uint64_t>();
  const auto counter = header.number<uint64_t>();
  if (length > kMaxPayloadBytes) {
    problem_ = concat("sent a message of ", length, " bytes; the limit is ", kMaxPayloadBytes);
    return false;
  }
  const std::size_t signed_bytes = kHeaderBytes + length;
  if (incoming_.size() < signed_bytes + kMacBytes) {
    return false;
  }
  const std::string_view bytes(incoming_);
  const auto expected =
      mac_of(side_ == Side::Hub ? Side::Leaf : Side::Hub, bytes.substr(0, signed_bytes));
  if (!equal_in_constant_time(expected, bytes.substr(signed_bytes, kMacBytes)) ||
      generation != generation_ || counter != num_received_ ||
      type > static_cast<uint8_t>(FrameType::Report)) {
    problem_ = "sent a message that is not authentic";
    return false;
  }
  ++num_received_;
  frames.push_back({static_cast<FrameType>(type), incoming_.substr(kHeaderBytes, length)});
  incoming_.erase(0, signed_bytes + kMacBytes);
  return true;
}

PendingPeer::PendingPeer(UniqueFd fd, SteadyTime deadline)
    : fd_(std::move(fd)), deadline_(deadline), nonce_(random_bytes(kNonceBytes)) {
  outgoing_ = concat(kMagic, nonce_);
  write_some(fd_.get(), outgoing_);  // 40 bytes always fit into a new socket
}

PendingPeer::State PendingPeer::advance(const std::string& secret) {
  const std::size_t prefix = kMagic.size() + 4;
  const IoStatus status = read_some(fd_.get(), incoming_, prefix + kMaxHelloBytes + kMacBytes);
  const auto known = std::min(incoming_.size(), kMagic.size());
  if (incoming_.compare(0, known, kMagic.substr(0, known)) != 0) {
    return State::Refused;
  }
  if (incoming_.size() >= prefix) {
    const std::string_view bytes(incoming_);
    const auto length = ByteReader(bytes.substr(kMagic.size(), 4)).number<uint32_t>();
    if (length > kMaxHelloBytes) {
      return State::Refused;
    }
    if (bytes.size() >= prefix + length + kMacBytes) {
      // A peer sends nothing more before rank 0 answers.
      const auto hello = bytes.substr(prefix, length);
      const bool authentic =
          equal_in_constant_time(hello_mac(secret, nonce_, hello), bytes.substr(prefix + length));
      auto decoded = authentic ? try_decode_message<Hello>(hello) : std::nullopt;
      if (!decoded) {
        return State::Refused;
      }
      hello_ = *std::move(decoded);
      return State::Accepted;
    }
  }
  return status == IoStatus::Closed ? State::Refused : State::Waiting;
}

ControlChannel PendingPeer::take_channel(const std::string& secret, uint64_t generation) {
  return ControlChannel(std::move(fd_), Side::Hub, session_key(secret, nonce_, hello_.nonce),
                        generation);
}

namespace {

// The hub's greeting: magic and nonce.
std::string read_greeting(int fd, SteadyTime deadline) {
  const std::size_t size = kMagic.size() + kNonceBytes;
  std::string bytes;
  while (bytes.size() < size) {
    if (!wait_for(fd, false, deadline)) {
      throw std::runtime_error("it sent no greeting");
    }
    if (read_some(fd, bytes, size - bytes.size()) == IoStatus::Closed) {
      throw std::runtime_error("it closed the connection");
    }
  }
  if (bytes.compare(0, kMagic.size(), kMagic) != 0) {
    throw std::runtime_error("another program listens there");
  }
  return bytes.substr(kMagic.size());
}

}  // namespace

ControlChannel connect_to_hub(const std::string& host, int port, const std::string& secret,
                              Hello hello, SteadyTime deadline) {
  std::string why;
  UniqueFd fd = connect_tcp(host, port, deadline, why);
  if (!fd.valid()) {
    throw std::runtime_error(why);
  }
  const std::string nonce = read_greeting(fd.get(), deadline);
  hello.nonce = random_bytes(kNonceBytes);
  hello.host.resize(std::min(hello.host.size(), kMaxHostBytes));
  const std::string payload = encode_message(hello);
  ByteWriter writer;
  writer.raw(kMagic).text(payload).raw(hello_mac(secret, nonce, payload));
  std::string message = writer.take();
  while (!message.empty()) {
    if (write_some(fd.get(), message) == IoStatus::Closed) {
      throw std::runtime_error("it closed the connection");
    }
    if (!message.empty() && !wait_for(fd.get(), true, deadline)) {
      throw std::runtime_error("it does not read its messages");
    }
  }
  return ControlChannel(std::move(fd), Side::Leaf, session_key(secret, nonce, hello.nonce),
                        hello.generation);
}

}  // namespace ddp::detail
