// SPDX-License-Identifier: Apache-2.0
// A rank that joins the control plane correctly, and that the test drives by hand from then on.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>

#include "core/control/control_leaf.hpp"
#include "core/control/wire/authentication.hpp"
#include "core/control/wire/message_codec.hpp"
#include "unit/core/plane_ranks.hpp"

namespace ddp::test {

struct Address {
  std::string host;
  int port = 0;
  std::string secret;
};

inline Address address_of(LocalRendezvous& rendezvous) {
  Address address;
  std::istringstream(rendezvous.contact()) >> address.host >> address.port >> address.secret;
  return address;
}

/// `generation_secret` proves the generation.
inline detail::Hello hello_from(const LaunchEnvironment& launch,
                                const std::string& generation_secret,
                                const std::string& host = "node9", uint32_t pid = 4711) {
  const auto mac_input = "generation " + launch.job_id + " " + launch.step_id + " " +
                         std::to_string(launch.restart_count) + " 0";
  detail::Hello hello;
  hello.generation =
      detail::ByteReader(detail::hmac_sha256(generation_secret, mac_input)).number<uint64_t>();
  hello.rank = static_cast<uint32_t>(launch.rank);
  hello.world_size = static_cast<uint32_t>(launch.world_size);
  hello.pid = pid;
  hello.host = host;
  return hello;
}

inline detail::JoinedHub join_by_hand(const Address& address, const LaunchEnvironment& launch,
                                      const std::string& host = "node9", uint32_t pid = 4711,
                                      const std::string& generation_secret = {}) {
  const auto& secret = generation_secret.empty() ? address.secret : generation_secret;
  return detail::join_hub(address.host, address.port, address.secret,
                          hello_from(launch, secret, host, pid), Clock::now() + 10s);
}

}  // namespace ddp::test
