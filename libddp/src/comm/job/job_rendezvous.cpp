// SPDX-License-Identifier: Apache-2.0
#include "comm/job/job_rendezvous.hpp"

#include <algorithm>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "core/control/wire/authentication.hpp"
#include "core/control/wire/tcp_socket.hpp"
#include "core/launch/rendezvous.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {
namespace {

constexpr const char* kHowToSetSecret =
    "set DDP_SECRET to the same random text of at least 16 characters on all ranks, for example "
    "DDP_SECRET=$(openssl rand -hex 32)";

bool on_one_host(const LaunchEnvironment& launch, const Membership& membership) {
  return launch.num_nodes == 1 && launch.local_world_size == membership.world_size;
}

// Limit for finding out whether this host knows its own name or rank 0's: a part of the rendezvous.
SteadyTime name_deadline(const ControlPlaneOptions& options) {
  return std::chrono::steady_clock::now() + options.rendezvous_timeout / 4;
}

// Only rank 0 listens. Returns loopback if no peer is on another host.
std::string choose_bind_address(const LaunchEnvironment& launch, const Membership& membership,
                                const ControlPlaneOptions& options) {
  if (!options.bind_address.empty()) {
    return options.bind_address;
  }
  if (membership.rank != 0) {
    return {};
  }
  return on_one_host(launch, membership) ? "127.0.0.1" : reachable_address(name_deadline(options));
}

std::string read_secret(const EnvironmentLookup& environment) {
  auto secret = environment("DDP_SECRET").value_or("");
  if (!secret.empty() && secret.size() < kMinSecretLength) {
    throw SettingsError(concat("DDP_SECRET has ", secret.size(), " characters, at least ",
                               kMinSecretLength, " are needed; fix: ", kHowToSetSecret));
  }
  return secret;
}

class MpiRendezvous final : public Rendezvous {
 public:
  MpiRendezvous(std::shared_ptr<MpiRuntime> mpi, std::string bind_address)
      : mpi_(std::move(mpi)), bind_address_(std::move(bind_address)) {}

  std::string bind_address() override { return bind_address_; }
  std::string exchange(int, const std::string& contact,
                       std::chrono::milliseconds timeout) override {
    if (contact_.empty()) {  // retrying to reach rank 0 must not broadcast again
      contact_ = mpi_->broadcast(contact, 0, timeout);
    }
    return contact_;
  }

 private:
  const std::shared_ptr<MpiRuntime> mpi_;
  const std::string bind_address_;
  std::string contact_;
};

// How torchrun's ranks share the secret. Each rank chooses by its own environment. The comments
// show the value that rank 0 puts into the store.
enum class SecretTransport {
  Derived,  // "address port nonce": the secret is HMAC(DDP_SECRET, nonce)
  File,     // the key of a file that contains "address port secret"
  Store     // "address port secret"
};

constexpr std::size_t kNonceLength = 64;  // hexadecimal digits of 32 bytes

bool is_hex(const std::string& text, std::size_t length) {
  return text.size() == length && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

class StoreRendezvous final : public Rendezvous {
 public:
  StoreRendezvous(const LaunchEnvironment& launch, const Membership& membership,
                  const ControlPlaneOptions& options, std::string known_secret, int context)
      : host_(launch.master_addr),
        port_(launch.master_port),
        key_(store_key(launch, context)),
        bind_address_(choose_bind_address(launch, membership, options)),
        known_secret_(std::move(known_secret)),
        nonce_(membership.rank == 0 ? to_hex(random_bytes(kNonceLength / 2)) : std::string()) {
    folder_ = options.rendezvous_folder;
    if (folder_.empty() && on_one_host(launch, membership)) {
      folder_ = "/tmp";  // not TMPDIR, which may differ between ranks
    }
    transport_ = !known_secret_.empty() ? SecretTransport::Derived
                 : !folder_.empty()     ? SecretTransport::File
                                        : SecretTransport::Store;
    if (membership.rank == 0 && transport_ == SecretTransport::Store) {
      log_warning(
          concat("the job's secret travels through torchrun's store at ", host_, ":", port_,
                 ", which everyone on the network can read; a reader can join the job; fix: ",
                 kHowToSetSecret,
                 ", or context.control_plane.rendezvous_folder to a folder that all nodes share"));
    }
  }

  std::string bind_address() override { return bind_address_; }
  // Rank 0 only: the others first learn the nonce from the store.
  std::string secret() override {
    return transport_ == SecretTransport::Derived && !nonce_.empty() ? derived_secret(nonce_) : "";
  }
  std::string exchange(int rank, const std::string& contact,
                       std::chrono::milliseconds timeout) override {
    try {
      // The store's own look-up has no limit.
      if (std::string why; !can_resolve(host_, std::chrono::steady_clock::now() + timeout, why)) {
        throw PeerLostError(why);
      }
      c10d::TCPStoreOptions options;
      options.port = static_cast<uint16_t>(port_);
      options.isServer = false;
      options.waitWorkers = false;
      options.timeout = timeout;
      c10d::TCPStore store(host_, options);
      return rank == 0 ? publish(store, contact, timeout) : fetch(store, timeout);
    } catch (const SettingsError&) {
      throw;  // another attempt would not help
    } catch (const std::exception& error) {
      throw PeerLostError(concat("rendezvous: ", rank == 0 ? "cannot publish" : "cannot read",
                                 " rank 0's address in torchrun's store at ", host_, ":", port_,
                                 " within ", timeout.count(), " ms; missing: 0 or the store (",
                                 error.what(), ")"));
    }
  }

 private:
  // Unique to this job and start, even if two jobs share one DDP_SECRET.
  std::string derived_secret(const std::string& nonce) const {
    return to_hex(hmac_sha256(known_secret_, "job " + nonce));
  }

  std::string publish(c10d::TCPStore& store, const std::string& contact,
                      std::chrono::milliseconds timeout) {
    std::string value = contact;
    if (transport_ == SecretTransport::Derived) {
      value += " " + nonce_;
    } else if (transport_ == SecretTransport::File) {
      file_ = make_file_rendezvous(folder_, nonce_, bind_address_);
      file_->exchange(0, contact, timeout);
      value = nonce_;
    }
    store.set(key_, std::vector<uint8_t>(value.begin(), value.end()));
    return contact;
  }

  std::string fetch(c10d::TCPStore& store, std::chrono::milliseconds timeout) const {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    for (;;) {
      const auto bytes = store.get(key_);
      std::string why = "the store has another value; fix: set the same DDP_SECRET on all ranks";
      const auto contact = parse_contact(std::string(bytes.begin(), bytes.end()), why);
      if (!contact.empty()) {
        return contact;
      }
      if (std::chrono::steady_clock::now() >= deadline) {
        throw PeerLostError(why);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }

  // Returns rank 0's contact with the secret, or nothing if others could have written `value`.
  std::string parse_contact(const std::string& value, std::string& why) const {
    if (transport_ == SecretTransport::Store) {
      return value;
    }
    if (transport_ == SecretTransport::File) {
      return is_hex(value, kNonceLength) ? read_contact_file(folder_, value, why) : "";
    }
    std::istringstream words(value);
    std::string address, port, nonce;
    words >> address >> port >> nonce;
    return is_hex(nonce, kNonceLength) ? concat(address, ' ', port, ' ', derived_secret(nonce))
                                       : "";
  }

  const std::string host_;
  const int port_;
  const std::string key_, bind_address_, known_secret_, nonce_;
  std::string folder_;
  SecretTransport transport_ = SecretTransport::Store;
  std::shared_ptr<Rendezvous> file_;  // rank 0's; destroyed with its file when all ranks have met
};

std::shared_ptr<Rendezvous> make_fixed(const LaunchEnvironment& launch,
                                       const Membership& membership,
                                       const ControlPlaneOptions& options,
                                       const std::string& secret) {
  // A host's own name often resolves to loopback, which its peers cannot reach.
  std::string bind_address = options.bind_address;
  if (bind_address.empty() && launch.num_nodes > 1 && membership.rank == 0 &&
      is_loopback(launch.master_addr, name_deadline(options))) {
    bind_address = reachable_address(name_deadline(options));
  }
  return make_fixed_rendezvous(launch.master_addr, launch.master_port, secret, bind_address);
}

std::shared_ptr<Rendezvous> make_file(const LaunchEnvironment& launch, const Membership& membership,
                                      const EnvironmentLookup& environment,
                                      const ControlPlaneOptions& options, int context) {
  std::string folder = options.rendezvous_folder;
  for (const char* name : {"SLURM_SUBMIT_DIR", "HOME"}) {
    if (folder.empty()) {
      folder = environment(name).value_or("");
    }
  }
  const auto key =
      concat(launch.job_id, '.', launch.step_id, '.', launch.restart_count, '.', context);
  return make_file_rendezvous(folder.empty() ? "." : folder, key,
                              choose_bind_address(launch, membership, options));
}

}  // namespace

// The store survives a restart of torchrun's workers, and several jobs may share it.
std::string store_key(const LaunchEnvironment& launch, int context) {
  return concat("ddp/contact/", launch.job_id, '/', launch.restart_count, '/', context);
}

std::shared_ptr<Rendezvous> make_job_rendezvous(const LaunchEnvironment& launch,
                                                const Membership& membership,
                                                const EnvironmentLookup& environment,
                                                const ControlPlaneOptions& options,
                                                std::shared_ptr<MpiRuntime> mpi, int context) {
  if (mpi != nullptr) {
    return std::make_shared<MpiRendezvous>(std::move(mpi),
                                           choose_bind_address(launch, membership, options));
  }
  const std::string secret = read_secret(environment);
  if (launch.torchrun_store) {
    return std::make_shared<StoreRendezvous>(launch, membership, options, secret, context);
  }
  if (!launch.master_addr.empty() && launch.master_port != 0) {
    return make_fixed(launch, membership, options, secret);
  }
  if (launch.source == LaunchSource::Slurm) {
    return make_file(launch, membership, environment, options, context);
  }
  throw SettingsError(concat(
      "rank ", membership.rank, " of ", membership.world_size, " (by ", to_string(launch.source),
      ") cannot find rank 0; fix: set MASTER_ADDR, MASTER_PORT and DDP_SECRET (or the argument "
      "rendezvous=host:port), or start the ranks with srun, mpirun or torchrun",
      MpiRuntime::is_built_in() ? "" : "; this build has no MPI"));
}

}  // namespace ddp::detail
