// SPDX-License-Identifier: Apache-2.0
#include "core/control/hub/peer_acceptor.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/control/failure/first_failure.hpp"
#include "core/settings/settings.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {
namespace {

// Limits on the time and number of strangers.
constexpr std::chrono::seconds kHandshakeTimeout{5};
constexpr std::size_t kMaxNewcomers = 512;
// A stranger may stay this long even if others wait for its place.
constexpr std::chrono::milliseconds kMinStay{20};
// Without a free descriptor the hub retries after this time.
constexpr std::chrono::milliseconds kAcceptPause{250};

}  // namespace

std::size_t newcomer_limit(int world_size) {
  const std::size_t limit = descriptor_limit();
  const std::size_t taken = count_descriptors() + static_cast<std::size_t>(world_size);
  return std::clamp<std::size_t>(limit > taken ? (limit - taken) / 4 : 0, 1, kMaxNewcomers);
}

PeerAcceptor::PeerAcceptor(Listener listener, std::string secret, std::size_t max_newcomers)
    : listener_(std::move(listener)), secret_(std::move(secret)), max_newcomers_(max_newcomers) {}

void PeerAcceptor::add_sockets(std::vector<pollfd>& watched, SteadyTime now) const {
  const bool paused = now < accept_again_;
  watched.push_back({paused ? -1 : listener_.fd.get(), POLLIN, 0});  // poll ignores -1
  for (const auto& newcomer : newcomers_) {
    watched.push_back({newcomer.fd(), POLLIN, 0});
  }
}

void PeerAcceptor::serve(SteadyTime now, const Admit& admit) {
  accept_newcomers(now);
  for (auto newcomer = newcomers_.begin(); newcomer != newcomers_.end();) {
    const auto state = newcomer->advance(secret_);
    if (state == PendingPeer::State::Accepted) {
      const Hello hello = newcomer->hello();
      admit(hello, newcomer->take_channel(secret_, hello.generation));
    }
    const bool done = state != PendingPeer::State::Waiting || now >= newcomer->deadline();
    newcomer = done ? newcomers_.erase(newcomer) : std::next(newcomer);
  }
}

void PeerAcceptor::accept_newcomers(SteadyTime now) {
  if (now < accept_again_) {
    return;
  }
  for (int i = 0; i < 64; ++i) {
    const bool full = newcomers_.size() >= max_newcomers_;
    if (full && !may_make_room(now)) {
      return;
    }
    std::string why;
    UniqueFd fd = accept_tcp(listener_.fd.get(), why);
    if (!fd.valid() && why.empty()) {
      return;
    }
    if (!fd.valid() && !may_make_room(now)) {
      pause(now, why);
      return;
    }
    if (!fd.valid() || full) {
      newcomers_.pop_front();
    }
    if (fd.valid()) {
      newcomers_.emplace_back(std::move(fd), now + kHandshakeTimeout);
    }
  }
}

// Whether the oldest stranger may be dropped for others: it had time to authenticate. A dropped
// rank tries again.
bool PeerAcceptor::may_make_room(SteadyTime now) const {
  return !newcomers_.empty() && now >= newcomers_.front().deadline() - kHandshakeTimeout + kMinStay;
}

// The listener stays readable during the pause, so polling it would keep this thread busy.
void PeerAcceptor::pause(SteadyTime now, const std::string& why) {
  if (problem_.empty()) {
    log_warning("control plane: rank 0 cannot accept a connection: " + why);
  }
  problem_ = why;
  accept_again_ = newcomers_.empty() ? now + kAcceptPause : now;
}

void PeerAcceptor::refuse(ControlChannel channel, const std::string& message, SteadyTime now) {
  FailureCause cause;
  cause.message = message;
  cause.exit_code = ExitCode::Settings;
  channel.queue(FrameType::Failure, encode_cause(cause));
  if (channel.flush() == IoStatus::WouldBlock) {
    refused_.push_back({std::move(channel), now + kHandshakeTimeout});
  }
}

void PeerAcceptor::flush_refused(SteadyTime now) {
  refused_.remove_if([now](Refused& refused) {
    return refused.channel.flush() != IoStatus::WouldBlock || now >= refused.deadline;
  });
}

}  // namespace ddp::detail
