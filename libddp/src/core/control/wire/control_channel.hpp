// SPDX-License-Identifier: Apache-2.0
// One authenticated connection of the control plane.
//
// Handshake, H = HMAC-SHA256 with the job's secret:
//   rank 0 -> peer   "DDPCTL2\n" nonce_s[32]
//   peer -> rank 0   "DDPCTL2\n" length[4] hello H("hello" nonce_s hello)
//   hello            message of a Hello, with nonce_c
// Both then hold the session key H("session" nonce_s nonce_c). A frame is
//   length[4] type[1] generation[8] counter[8] payload mac[32]
// The session key signs the direction and all bytes before the mac. The counter reveals frames that
// were replayed, dropped or swapped. No part of a frame is used before its mac is verified.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/control/wire/tcp_socket.hpp"

namespace ddp::detail {

inline constexpr std::string_view kMagic = "DDPCTL2\n";
inline constexpr std::size_t kNonceBytes = 32;
inline constexpr std::size_t kMaxHelloBytes = 1024;
inline constexpr std::size_t kMaxHostBytes = 255;
inline constexpr std::size_t kMaxValueBytes = 1 << 20;  ///< limit of a collective's value
inline constexpr std::size_t kMaxPayloadBytes = kMaxValueBytes + 4096;

enum class FrameType : uint8_t {
  Welcome,
  Heartbeat,
  Progress,
  Contribution,
  Result,
  Failure,
  Exchange,
  Exchanged,
  Position,
  ReportRequest,  ///< from rank 0: answer with a Report; to rank 0: make a report of all ranks
  Report          // the last
};

struct Frame {
  FrameType type = FrameType::Heartbeat;
  std::string payload;
};

/// "sent a message of type 3 with 90 bytes that is not valid"
std::string describe_invalid(const Frame& frame);

/// The identity that a peer claims. It is trusted once its mac is verified.
struct Hello {
  std::string nonce;
  uint64_t generation = 0;
  uint32_t rank = 0;
  uint32_t world_size = 0;
  uint32_t pid = 0;
  std::string host;

  bool is_valid() const { return nonce.size() == kNonceBytes && host.size() <= kMaxHostBytes; }
  friend auto message_fields(Hello& hello) {
    return std::tie(hello.nonce, hello.generation, hello.rank, hello.world_size, hello.pid,
                    hello.host);
  }
};

enum class Side { Hub, Leaf };

class ControlChannel {
 public:
  ControlChannel(UniqueFd fd, Side side, std::string session_key, uint64_t generation);

  int fd() const { return fd_.get(); }
  void queue(FrameType type, std::string_view payload);
  bool wants_to_write() const { return !outgoing_.empty(); }
  std::size_t num_unsent_bytes() const { return outgoing_.size(); }
  /// Returns Closed if the peer is gone; never blocks.
  IoStatus flush();
  /// Appends complete frames to `frames`. Returns Closed if the peer is gone or sent an invalid
  /// frame, and Done if more bytes are left for the next call; never blocks.
  IoStatus receive(std::vector<Frame>& frames);
  /// The reason of Closed as part of a message.
  std::string why_closed() const;

 private:
  std::string mac_of(Side sender, std::string_view bytes) const;
  bool take_frame(std::vector<Frame>& frames);

  UniqueFd fd_;
  Side side_;
  std::string session_key_;
  uint64_t generation_;
  uint64_t num_sent_ = 0, num_received_ = 0;
  std::string incoming_, outgoing_;
  std::string problem_;
};

/// Rank 0's side of a handshake. An unproven peer can make it store little more than
/// kMaxHelloBytes.
class PendingPeer {
 public:
  PendingPeer(UniqueFd fd, SteadyTime deadline);

  int fd() const { return fd_.get(); }
  SteadyTime deadline() const { return deadline_; }
  enum class State { Waiting, Accepted, Refused };
  /// Reads the received bytes. After Accepted, hello() is authentic and take_channel() may be
  /// called.
  State advance(const std::string& secret);
  const Hello& hello() const { return hello_; }
  ControlChannel take_channel(const std::string& secret, uint64_t generation);

 private:
  UniqueFd fd_;
  SteadyTime deadline_;
  std::string nonce_;
  std::string incoming_, outgoing_;
  Hello hello_;
};

/// A peer's side of a handshake: connects and sends its hello. Rank 0's first frame proves that it
/// accepted. Throws std::runtime_error with the reason on failure or at `deadline`.
ControlChannel connect_to_hub(const std::string& host, int port, const std::string& secret,
                              Hello hello, SteadyTime deadline);

}  // namespace ddp::detail
