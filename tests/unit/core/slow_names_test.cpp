// SPDX-License-Identifier: Apache-2.0
// A name service that does not answer: no limit of the rendezvous waits for it.
#include <dlfcn.h>
#include <netdb.h>

#include <string_view>
#include <thread>

#include "core/control/wire/tcp_socket.hpp"
#include "core/launch/rendezvous.hpp"
#include "support/catch.hpp"
#include "unit/core/plane_ranks.hpp"

namespace {

constexpr const char* kSlowHost = "slow.example";

}  // namespace

// Replaces the C library's function in this program. One name is answered late.
extern "C" int getaddrinfo(const char* host, const char* service, const addrinfo* hints,
                           addrinfo** list) {
  if (host != nullptr && std::string_view(host) == kSlowHost &&
      (hints->ai_flags & AI_NUMERICHOST) == 0) {
    std::this_thread::sleep_for(std::chrono::seconds(4));
    return EAI_AGAIN;
  }
  using Function = int (*)(const char*, const char*, const addrinfo*, addrinfo**);
  static const auto next = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "getaddrinfo"));
  return next(host, service, hints, list);
}

namespace ddp::test {
namespace {

TEST_CASE("rendezvous: a slow name service does not extend the limit", "[control_plane]") {
  auto options = fast_options();
  options.rendezvous_timeout = 500ms;
  const auto fixed = detail::make_fixed_rendezvous(kSlowHost, 4321, "secret");
  for (const int rank : {0, 1}) {
    const auto start = Clock::now();
    const auto end =
        end_of([&] { detail::create_control_plane(launch_of(rank, 2), fixed, options); });
    INFO(end.error);
    REQUIRE(seconds_since(start) < 2);
    REQUIRE(end.exit_code == static_cast<int>(rank == 0 ? ExitCode::Settings : ExitCode::PeerLost));
    REQUIRE_THAT(end.error, Catch::Contains("host 'slow.example'") &&
                                Catch::Contains("the name service did not answer in time"));
  }
}

TEST_CASE("sockets: every look-up of a name has a limit", "[control_plane]") {
  const auto start = Clock::now();
  std::string why;
  REQUIRE_FALSE(detail::can_resolve(kSlowHost, start + 200ms, why));
  REQUIRE_THAT(why, Catch::Contains("did not answer in time"));
  REQUIRE_FALSE(detail::is_loopback(kSlowHost, Clock::now() + 200ms));
  REQUIRE_FALSE(detail::connect_tcp(kSlowHost, 1, Clock::now() + 200ms, why).valid());
  REQUIRE(seconds_since(start) < 2);
  REQUIRE(detail::can_resolve("localhost", Clock::now() + 5s, why));
  REQUIRE(detail::is_loopback("localhost", Clock::now() + 5s));
  REQUIRE_FALSE(detail::can_resolve("no name", Clock::now() + 5s, why));
  REQUIRE_THAT(why, Catch::StartsWith("host 'no name': "));
}

}  // namespace
}  // namespace ddp::test
