// SPDX-License-Identifier: Apache-2.0
// A connection of the control plane accepts only frames that are complete, authentic and in order.
#include "core/control/wire/control_channel.hpp"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <random>

#include "core/control/failure/first_failure.hpp"
#include "core/control/plane_interfaces.hpp"
#include "core/control/wire/authentication.hpp"
#include "core/control/wire/control_messages.hpp"
#include "core/control/wire/message_codec.hpp"
#include "support/catch.hpp"

namespace ddp::detail {
namespace {

const std::string kKey(32, 'k');

struct Pair {
  Pair() {
    int fds[2];
    socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds);
    left = UniqueFd(fds[0]);
    right = UniqueFd(fds[1]);
  }
  UniqueFd left, right;
};

std::string frame_bytes(uint64_t generation, const std::vector<std::string>& payloads) {
  Pair pair;
  ControlChannel leaf(std::move(pair.left), Side::Leaf, kKey, generation);
  for (const auto& payload : payloads) {
    leaf.queue(FrameType::Contribution, payload);
  }
  leaf.flush();
  std::string bytes;
  while (read_some(pair.right.get(), bytes, 1 << 16) == IoStatus::Done) {
  }
  return bytes;
}

struct Received {
  IoStatus status;
  std::vector<Frame> frames;
  std::string problem;
};

Received receive(const std::string& bytes) {
  Pair pair;
  std::string rest = bytes;
  write_some(pair.left.get(), rest);
  ControlChannel hub(std::move(pair.right), Side::Hub, kKey, 5);
  Received received;
  received.status = hub.receive(received.frames);
  received.problem = hub.why_closed();
  return received;
}

TEST_CASE("control channel: authentic frames arrive in order", "[control_plane][locale]") {
  const auto received = receive(frame_bytes(5, {"one", "", "three"}));
  REQUIRE(received.status == IoStatus::WouldBlock);
  REQUIRE(received.frames.size() == 3);
  REQUIRE(received.frames[0].payload == "one");
  REQUIRE(received.frames[2].payload == "three");
  REQUIRE(received.frames[2].type == FrameType::Contribution);
}

TEST_CASE("control channel: every flipped bit is found", "[control_plane]") {
  const auto good = frame_bytes(5, {"payload"});
  for (std::size_t at = 0; at < good.size() * 8; ++at) {
    auto bad = good;
    bad[at / 8] = static_cast<char>(bad[at / 8] ^ 1 << at % 8);
    const auto received = receive(bad);
    INFO("bit " << at);
    REQUIRE(received.frames.empty());
    // A longer length (up to the limit) waits for bytes that never come; all other changes are
    // refused.
    REQUIRE((received.status == IoStatus::Closed || at < 32));
  }
}

TEST_CASE("control channel: replayed, dropped and foreign frames are refused", "[control_plane]") {
  const auto one = frame_bytes(5, {"a"});
  const auto two = frame_bytes(5, {"a", "b"});
  REQUIRE(receive(one + one).status == IoStatus::Closed);
  REQUIRE(receive(one + one).frames.size() == 1);
  REQUIRE(receive(two.substr(one.size())).frames.empty());
  REQUIRE(receive(two.substr(one.size())).status == IoStatus::Closed);
  REQUIRE(receive(frame_bytes(6, {"a"})).problem == "sent a message that is not authentic");
  // Rank 0's own frames are not accepted as a peer's.
  Pair pair;
  ControlChannel hub(std::move(pair.left), Side::Hub, kKey, 5);
  hub.queue(FrameType::Contribution, "a");
  hub.flush();
  std::string mirrored;
  read_some(pair.right.get(), mirrored, 1 << 16);
  REQUIRE(receive(mirrored).status == IoStatus::Closed);
}

TEST_CASE("control channel: a frame that claims too much is refused at its header",
          "[control_plane]") {
  auto bytes = frame_bytes(5, {"a"});
  bytes[3] = '\x7f';
  const auto received = receive(bytes);
  REQUIRE(received.status == IoStatus::Closed);
  REQUIRE_THAT(received.problem, Catch::Contains("the limit is"));
}

TEST_CASE("control channel: half a frame waits", "[control_plane]") {
  const auto bytes = frame_bytes(5, {"payload"});
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    const auto received = receive(bytes.substr(0, size));
    REQUIRE(received.status == IoStatus::WouldBlock);
    REQUIRE(received.frames.empty());
  }
}

TEST_CASE("control channel: decoders take any bytes", "[control_plane][locale]") {
  std::mt19937 random(3);
  int accepted = 0;
  for (int i = 0; i < 100'000; ++i) {
    std::string bytes(random() % 96, '\0');
    for (auto& byte : bytes) {
      byte = static_cast<char>(random() % 4 == 0 ? random() : 0);
    }
    accepted += try_decode_message<Hello>(bytes).has_value() +
                try_decode_message<FailureCause>(bytes).has_value() +
                try_decode_message<Contribution>(bytes).has_value();
  }
  REQUIRE(accepted < 100'000);
  Hello hello;
  hello.nonce = std::string(kNonceBytes, 'n');
  hello.rank = 3;
  hello.host = "node";
  const auto copy = try_decode_message<Hello>(encode_message(hello));
  REQUIRE(copy);
  REQUIRE((copy->rank == 3 && copy->host == "node" && copy->nonce == hello.nonce));
  REQUIRE_FALSE(try_decode_message<Hello>(encode_message(hello) + "x"));
}

TEST_CASE("control messages: an exchange travels whole, and only whole",
          "[control_plane][locale]") {
  const auto sent = encode_message(ExchangeValue{7, 3, "of 1"});
  const auto value = try_decode_message<ExchangeValue>(sent);
  REQUIRE(value);
  REQUIRE((value->key == 7 && value->num_ranks == 3 && value->value == "of 1"));
  const auto answer = encode_message(ExchangeResult{7, {{1, "of 1"}, {3, ""}}});
  const auto result = try_decode_message<ExchangeResult>(answer);
  REQUIRE(result);
  REQUIRE(result->key == 7);
  REQUIRE(result->values == std::map<int, std::string>{{1, "of 1"}, {3, ""}});
  for (std::size_t size = 0; size < sent.size(); ++size) {
    REQUIRE_FALSE(try_decode_message<ExchangeValue>(sent.substr(0, size)));
  }
  for (std::size_t size = 0; size < answer.size(); ++size) {
    REQUIRE_FALSE(try_decode_message<ExchangeResult>(answer.substr(0, size)));
  }
  REQUIRE_FALSE(try_decode_message<ExchangeResult>(answer + "x"));
  const std::string longest(GroupExchange::kMaxExchangeBytes, 'x');
  REQUIRE(try_decode_message<ExchangeValue>(encode_message(ExchangeValue{7, 3, longest})));
  REQUIRE_FALSE(
      try_decode_message<ExchangeValue>(encode_message(ExchangeValue{7, 3, longest + "x"})));
}

TEST_CASE("authentication: HMAC-SHA256 as in RFC 4231", "[control_plane]") {
  REQUIRE(to_hex(hmac_sha256("Jefe", "what do ya want for nothing?")) ==
          "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  REQUIRE(random_bytes(32) != random_bytes(32));
  REQUIRE_FALSE(equal_in_constant_time("ab", "abc"));
  REQUIRE_FALSE(equal_in_constant_time("abd", "abc"));
  REQUIRE(equal_in_constant_time("abc", "abc"));
}

struct LoopbackAddress {
  explicit LoopbackAddress(int port) {
    where.sin_family = AF_INET;
    where.sin_port = htons(static_cast<uint16_t>(port));
    where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    info.ai_family = AF_INET;
    info.ai_addr = reinterpret_cast<sockaddr*>(&where);
    info.ai_addrlen = sizeof(where);
  }
  LoopbackAddress(const LoopbackAddress&) = delete;
  LoopbackAddress& operator=(const LoopbackAddress&) = delete;

  sockaddr_in where{};
  addrinfo info{};
};

TEST_CASE("tcp: an address that never answers leaves time for the next one", "[control_plane]") {
  const auto silent = listen_tcp("127.0.0.1", 0);
  const auto answers = listen_tcp("127.0.0.1", 0);
  LoopbackAddress first(silent->port);
  LoopbackAddress second(answers->port);
  // A full queue neither accepts nor refuses a connection, like a firewall that drops packets.
  listen(silent->fd.get(), 0);
  std::vector<UniqueFd> queue;
  for (int i = 0; i < 4; ++i) {
    queue.emplace_back(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    connect(queue.back().get(), first.info.ai_addr, first.info.ai_addrlen);
  }
  const auto start = std::chrono::steady_clock::now();
  const auto milliseconds_until_now = [start] {
    return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() -
                                                                 start)
        .count();
  };
  std::string why;
  REQUIRE_FALSE(connect_any(&first.info, start + std::chrono::milliseconds(200), why).valid());
  REQUIRE(why == "127.0.0.1: no answer");
  REQUIRE(milliseconds_until_now() >= 190);
  first.info.ai_next = &second.info;
  REQUIRE(connect_any(&first.info, start + std::chrono::milliseconds(1200), why).valid());
  REQUIRE(milliseconds_until_now() >= 600);
}

}  // namespace
}  // namespace ddp::detail
