// SPDX-License-Identifier: Apache-2.0
// Bytes from another process, to the control plane. The first byte chooses what they are.
#include <sys/socket.h>

#include <array>
#include <functional>

#include "core/control/doctor/rank_report.hpp"
#include "core/control/failure/first_failure.hpp"
#include "core/control/rank_position.hpp"
#include "core/control/rank_reports.hpp"
#include "core/control/wire/authentication.hpp"
#include "core/control/wire/control_channel.hpp"
#include "core/control/wire/control_messages.hpp"
#include "core/control/wire/message_codec.hpp"
#include "fuzz/fuzz.hpp"

namespace {

using namespace ddp::detail;

constexpr const char* kSecret = "the job's secret";

template <typename T>
void read_message(std::string_view bytes) {
  if (const auto value = try_decode_message<T>(bytes)) {
    fuzz::require(encode_message(*value) == bytes, "an accepted message is one that we write");
  }
}

struct Sockets {
  UniqueFd ours, theirs;
  Sockets() {
    std::array<int, 2> ends{};
    fuzz::require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends.data()) == 0, "pair");
    ours = UniqueFd(ends[0]);
    theirs = UniqueFd(ends[1]);
  }
};

std::string received(int fd) {
  std::string bytes;
  while (read_some(fd, bytes, kMaxPayloadBytes) == IoStatus::Done) {
  }
  return bytes;
}

// A valid frame, changed by `changes`: an attacker who does not know the key.
void read_frame(std::string_view payload, std::string_view changes) {
  Sockets to_sender, to_receiver;
  ControlChannel sender(std::move(to_sender.ours), Side::Leaf, "key", 7);
  ControlChannel receiver(std::move(to_receiver.ours), Side::Hub, "key", 7);
  sender.queue(FrameType::Contribution, payload);
  (void)sender.flush();
  std::string wire = received(to_sender.theirs.get());
  bool changed = false;
  for (std::size_t i = 0; i < std::min(wire.size(), changes.size()); ++i) {
    wire[i] = static_cast<char>(wire[i] ^ changes[i]);
    changed = changed || changes[i] != 0;
  }
  (void)write_some(to_receiver.theirs.get(), wire);
  std::vector<Frame> frames;
  (void)receiver.receive(frames);
  (void)receiver.why_closed();
  fuzz::require(frames.size() == (changed ? 0 : 1), "exactly the unchanged frame is taken");
  fuzz::require(changed || frames.front().payload == payload, "the payload arrives unchanged");
}

// A hello with the right mac, or bytes without one.
void shake_hands(std::string_view hello, bool sign) {
  Sockets sockets;
  PendingPeer peer(std::move(sockets.ours), SteadyTime::max());
  const auto nonce = received(sockets.theirs.get()).substr(kMagic.size());
  std::string answer(hello);
  if (sign) {
    const auto mac = hmac_sha256(kSecret, ddp::concat("hello", nonce, hello));
    answer = ByteWriter().raw(kMagic).text(hello).raw(mac).take();
  }
  (void)write_some(sockets.theirs.get(), answer);
  const bool accepted = peer.advance(kSecret) == PendingPeer::State::Accepted;
  fuzz::require(accepted == (sign && hello.size() <= kMaxHelloBytes &&
                             try_decode_message<Hello>(hello).has_value()),
                "a signed valid hello is accepted, and no other");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  static const std::array<std::function<void(std::string_view)>, 12> kReaders{
      read_message<Hello>,
      read_message<Contribution>,
      read_message<ResultPart>,
      read_message<ExchangeValue>,
      read_message<ExchangeResult>,
      read_message<ddp::FailureCause>,
      read_message<Progress>,
      read_message<RankPosition>,
      [](std::string_view bytes) { shake_hands(bytes, true); },
      [](std::string_view bytes) { shake_hands(bytes, false); },
      [](std::string_view bytes) {
        const auto half = bytes.size() / 2;
        read_frame(bytes.substr(0, half), bytes.substr(half));
      },
      read_message<RankReport>};
  if (size > 0) {
    kReaders[data[0] % kReaders.size()](fuzz::view(data + 1, size - 1));
  }
  return 0;
}
