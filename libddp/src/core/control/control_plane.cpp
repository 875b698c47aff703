// SPDX-License-Identifier: Apache-2.0
#include "ddp/core/control_plane.hpp"

#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "core/control/control_leaf.hpp"
#include "core/control/hub/control_hub.hpp"
#include "core/control/star_plane.hpp"
#include "core/control/wire/authentication.hpp"
#include "core/control/wire/message_codec.hpp"
#include "core/launch/rendezvous.hpp"
#include "core/launch/training_state.hpp"
#include "core/settings/parse_number.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/detail/check.hpp"

namespace ddp {
namespace {

using Clock = std::chrono::steady_clock;

// Limit for one attempt to reach rank 0, or to identify a stranger at its port.
constexpr std::chrono::seconds kAttemptTimeout{3};

struct Contact {
  std::string address;
  int port = 0;
  std::string secret;
};

bool parse_contact(const std::string& text, Contact& contact) {
  std::istringstream words(text);
  std::string port;
  words >> contact.address >> port >> contact.secret;
  contact.port = detail::parse_number<int>(port).value_or(0);
  return !contact.address.empty() && contact.port > 0 && contact.port < 65536 &&
         !contact.secret.empty();
}

// Identifies this start of the job and this meeting of its ranks. A process of an earlier start or
// an earlier meeting that knows the secret has another number.
uint64_t make_generation(const LaunchEnvironment& launch, const Membership& membership,
                         const std::string& secret) {
  const auto mac =
      detail::hmac_sha256(secret, concat("generation ", launch.job_id, ' ', launch.step_id, ' ',
                                         launch.restart_count, ' ', membership.generation));
  return detail::ByteReader(mac).number<uint64_t>();
}

detail::Hello make_hello(const LaunchEnvironment& launch, const Membership& membership,
                         const std::string& secret) {
  detail::Hello hello;
  hello.generation = make_generation(launch, membership, secret);
  hello.rank = static_cast<uint32_t>(membership.rank);
  hello.world_size = static_cast<uint32_t>(membership.world_size);
  hello.pid = static_cast<uint32_t>(getpid());
  hello.host = detail::host_name();
  return hello;
}

// This rank's port is taken. If a rank 0 of this job holds it, this rank's hello makes it report
// the conflict to all ranks. Otherwise the user must choose another port.
[[noreturn]] void report_taken_port(const detail::Hello& hello, const std::string& address,
                                    int port, const std::string& secret) {
  std::optional<FailureCause> answer;
  try {
    const auto hub = detail::join_hub(address, port, secret, hello, Clock::now() + kAttemptTimeout);
    if (hub.frames.front().type == detail::FrameType::Failure) {
      answer = detail::try_decode_message<FailureCause>(hub.frames.front().payload);
    }
  } catch (const std::runtime_error&) {
    // Not a rank 0 of this job.
  }
  if (answer) {
    detail::throw_failure(*answer);
  }
  throw SettingsError(concat("port ", port, " of ", address,
                             ", where rank 0 must listen, is already in use by another program; "
                             "fix: choose a free port (MASTER_PORT, or the rendezvous argument)"));
}

std::unique_ptr<ControlPlane> create_hub(const LaunchEnvironment& launch,
                                         const Membership& membership,
                                         detail::Rendezvous& rendezvous,
                                         const ControlPlaneOptions& options) {
  const std::string address = rendezvous.bind_address();
  const std::string known_secret = rendezvous.secret();
  const std::string secret =
      known_secret.empty() ? detail::to_hex(detail::random_bytes(32)) : known_secret;
  const int port = rendezvous.bind_port();
  detail::raise_descriptor_limit();  // one connection per rank, plus the training's files
  auto listener = detail::listen_tcp(address, port, Clock::now() + options.rendezvous_timeout);
  if (!listener) {
    report_taken_port(make_hello(launch, membership, secret), address, port, secret);
  }
  const std::string contact = concat(address, ' ', listener->port);
  auto plane =
      std::make_unique<detail::StarPlane>(membership, options, [&](detail::RankState& state) {
        return std::make_unique<detail::ControlHub>(state, std::move(*listener), secret,
                                                    make_generation(launch, membership, secret));
      });
  rendezvous.exchange(0, known_secret.empty() ? contact + " " + secret : contact,
                      options.rendezvous_timeout);
  plane->wait_for_all();
  return plane;
}

std::unique_ptr<ControlPlane> create_leaf(const LaunchEnvironment& launch,
                                          const Membership& membership,
                                          detail::Rendezvous& rendezvous,
                                          const ControlPlaneOptions& options) {
  const auto deadline = Clock::now() + options.rendezvous_timeout;
  std::string why;
  while (Clock::now() < deadline) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    Contact contact;
    contact.secret = rendezvous.secret();
    if (parse_contact(rendezvous.exchange(membership.rank, {}, left), contact)) {
      try {
        auto hub = detail::join_hub(contact.address, contact.port, contact.secret,
                                    make_hello(launch, membership, contact.secret),
                                    std::min(deadline, Clock::now() + kAttemptTimeout));
        auto plane =
            std::make_unique<detail::StarPlane>(membership, options, [&](detail::RankState& state) {
              return std::make_unique<detail::ControlLeaf>(state, std::move(hub));
            });
        plane->wait_for_all();
        return plane;
      } catch (const Error&) {
        throw;  // rank 0 was reached and reports the error
      } catch (const std::runtime_error& error) {
        // The deadline may cut the last attempt short. Then an earlier refusal says more.
        if (why.empty() || Clock::now() < deadline) {
          why = concat(contact.address, " port ", contact.port, ": ", error.what());
        }
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  throw PeerLostError(
      concat("rendezvous: missing: 0; rank ", membership.rank, " did not reach rank 0 within ",
             options.rendezvous_timeout.count(), " ms (",
             why.empty() ? "the address of rank 0 is unknown" : why,
             "); fix: see what rank 0 printed and whether its address can be reached from "
             "here, or raise context.control_plane.rendezvous_timeout_ms"));
}

// The cause comes first: rank and host tell nothing in a job of one rank.
std::string line_of_only_rank(const FailureCause& cause) {
  return concat(cause.message, " (rank 0", detail::step_words(cause.step),
                cause.where.empty() ? "" : concat(" in ", cause.where), ")");
}

// The control plane at world size 1.
class SinglePlane final : public ControlPlane {
 public:
  explicit SinglePlane(int64_t generation)
      : membership_{.generation = generation, .hosts = {detail::host_name()}},
        failure_(generation) {}

  const Membership& membership() const override { return membership_; }
  std::string broadcast(const std::string& value, int) override { return value; }
  std::vector<std::string> all_gather(const std::string& value) override { return {value}; }
  void barrier() override {}
  void set_progress(int64_t step, const std::string& where) override {
    const std::lock_guard lock(mutex_);
    step_ = step;
    where_ = where;
  }
  void publish_failure(const FailureCause& cause) override {
    FailureCause full = cause;
    {
      const std::lock_guard lock(mutex_);
      full.rank = 0;
      full.host = cause.host.empty() ? membership_.hosts[0] : cause.host;
      full.step = cause.step >= 0 ? cause.step : training_.step_of(step_);
      full.where = cause.where.empty() ? where_ : cause.where;
    }
    if (failure_.set(full)) {
      log_error("first cause: " + line_of_only_rank(full));
      failure_.run_callbacks();
    }
  }
  bool failed() const override { return failure_.failed(); }
  FailureCause failure() const override { return failure_.get(); }
  int add_failure_callback(std::function<void(const FailureCause&)> callback) override {
    return failure_.add_callback(std::move(callback));
  }
  void remove_failure_callback(int token) override { failure_.remove_callback(token); }
  void close() override {}

 private:
  const Membership membership_;
  std::mutex mutex_;
  const detail::TrainingWatch training_;
  int64_t step_ = -1;
  std::string where_;
  detail::FirstFailure failure_;
};

std::string shortened(const std::string& value) {
  return value.size() <= 200 ? value : value.substr(0, 200) + "…";
}

}  // namespace

std::unique_ptr<ControlPlane> detail::create_control_plane(const LaunchEnvironment& launch,
                                                           const Membership& membership,
                                                           std::shared_ptr<Rendezvous> rendezvous,
                                                           const ControlPlaneOptions& options) {
  if (membership.world_size == 1) {
    return std::make_unique<SinglePlane>(membership.generation);
  }
  DDP_CHECK(rendezvous != nullptr, "several ranks need a rendezvous");
  return membership.rank == 0 ? create_hub(launch, membership, *rendezvous, options)
                              : create_leaf(launch, membership, *rendezvous, options);
}

std::unique_ptr<ControlPlane> detail::create_control_plane(const LaunchEnvironment& launch,
                                                           std::shared_ptr<Rendezvous> rendezvous,
                                                           const ControlPlaneOptions& options) {
  return create_control_plane(launch, launch.membership(), std::move(rendezvous), options);
}

std::vector<std::string> ControlPlane::gather(const std::string& value, int root) {
  auto values = all_gather(value);
  return rank() == root ? values : std::vector<std::string>();
}

std::vector<std::vector<int64_t>> ControlPlane::all_gather_numbers(
    const std::vector<int64_t>& numbers) {
  return detail::all_gather_messages(*this, numbers);
}

bool ControlPlane::agree_any(bool value) {
  const auto values = detail::all_gather_messages(*this, value);
  return std::find(values.begin(), values.end(), true) != values.end();
}

std::string ControlPlane::require_equal(const std::string& what, const std::string& value) {
  const auto values = all_gather(value);
  for (std::size_t rank = 1; rank < values.size(); ++rank) {
    if (values[rank] != values[0]) {
      throw MismatchError(concat(what, " differs between ranks: '", shortened(values[0]),
                                 "' on rank 0, '", shortened(values[rank]), "' on rank ", rank));
    }
  }
  return values[0];
}

}  // namespace ddp
