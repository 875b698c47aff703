// SPDX-License-Identifier: Apache-2.0
#include "comm/job_rendezvous.hpp"

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "core/rendezvous.hpp"
#include "core/tcp_socket.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

// Loopback where no peer is on another host.
std::string choose_bind_address(const LaunchEnvironment& launch,
                                const ControlPlaneOptions& options) {
  if (!options.bind_address.empty()) {
    return options.bind_address;
  }
  const bool one_host = launch.num_nodes == 1 && launch.local_world_size == launch.world_size;
  return one_host ? "127.0.0.1" : reachable_address();
}

class MpiRendezvous final : public Rendezvous {
 public:
  MpiRendezvous(std::shared_ptr<MpiRuntime> mpi, std::string bind_address)
      : mpi_(std::move(mpi)), bind_address_(std::move(bind_address)) {}

  std::string bind_address() override { return bind_address_; }
  std::string exchange(int, const std::string& contact,
                       std::chrono::milliseconds timeout) override {
    if (contact_.empty()) {  // a second attempt to reach rank 0 must not broadcast again
      contact_ = mpi_->broadcast(contact, 0, timeout);
    }
    return contact_;
  }

 private:
  const std::shared_ptr<MpiRuntime> mpi_;
  const std::string bind_address_;
  std::string contact_;
};

class StoreRendezvous final : public Rendezvous {
 public:
  StoreRendezvous(const LaunchEnvironment& launch, std::string bind_address, std::string secret)
      : host_(launch.master_addr),
        port_(launch.master_port),
        // The store lives on when torchrun starts the workers again.
        key_(concat("ddp/contact/", launch.restart_count)),
        bind_address_(std::move(bind_address)),
        secret_(std::move(secret)) {}

  std::string bind_address() override { return bind_address_; }
  std::string secret() override { return secret_; }
  std::string exchange(int rank, const std::string& contact,
                       std::chrono::milliseconds timeout) override {
    try {
      return talk(rank, contact, timeout);
    } catch (const std::exception& error) {
      throw PeerLostError(concat("rendezvous: ", rank == 0 ? "cannot tell" : "cannot learn",
                                 " rank 0's address through torchrun's store at ", host_, ":",
                                 port_, " within ", timeout.count(),
                                 " ms; missing: 0 or the store (", error.what(), ")"));
    }
  }

 private:
  std::string talk(int rank, const std::string& contact, std::chrono::milliseconds timeout) {
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(port_);
    options.isServer = false;
    options.waitWorkers = false;
    options.timeout = timeout;
    c10d::TCPStore store(host_, options);
    if (rank == 0) {
      store.set(key_, std::vector<uint8_t>(contact.begin(), contact.end()));
      return contact;
    }
    const auto value = store.get(key_);
    return std::string(value.begin(), value.end());
  }

  const std::string host_;
  const int port_;
  const std::string key_, bind_address_, secret_;
};

std::shared_ptr<Rendezvous> make_fixed(const LaunchEnvironment& launch,
                                       const ControlPlaneOptions& options,
                                       const std::string& secret) {
  // A host's own name often means loopback on that host, which its peers cannot reach.
  std::string bind_address = options.bind_address;
  if (bind_address.empty() && launch.num_nodes > 1 && launch.rank == 0 &&
      is_loopback(launch.master_addr)) {
    bind_address = reachable_address();
  }
  return make_fixed_rendezvous(launch.master_addr, launch.master_port, secret, bind_address);
}

std::shared_ptr<Rendezvous> make_file(const LaunchEnvironment& launch,
                                      const EnvironmentLookup& environment,
                                      const ControlPlaneOptions& options) {
  std::string folder = options.rendezvous_folder;
  for (const char* name : {"SLURM_SUBMIT_DIR", "HOME"}) {
    if (folder.empty()) {
      folder = environment(name).value_or("");
    }
  }
  const auto key = concat(launch.job_id, '.', launch.step_id, '.', launch.restart_count);
  return make_file_rendezvous(folder.empty() ? "." : folder, key,
                              choose_bind_address(launch, options));
}

}  // namespace

std::shared_ptr<Rendezvous> make_job_rendezvous(const LaunchEnvironment& launch,
                                                const EnvironmentLookup& environment,
                                                const ControlPlaneOptions& options,
                                                std::shared_ptr<MpiRuntime> mpi) {
  const std::string secret = environment("DDP_SECRET").value_or("");
  if (mpi != nullptr) {
    return std::make_shared<MpiRendezvous>(std::move(mpi), choose_bind_address(launch, options));
  }
  if (launch.torchrun_store) {
    return std::make_shared<StoreRendezvous>(launch, choose_bind_address(launch, options), secret);
  }
  if (!launch.master_addr.empty() && launch.master_port != 0) {
    return make_fixed(launch, options, secret);
  }
  if (launch.source == LaunchSource::Slurm) {
    return make_file(launch, environment, options);
  }
  throw SettingsError(concat(
      "rank ", launch.rank, " of ", launch.world_size, " (by ", to_string(launch.source),
      ") has no way to find rank 0: set MASTER_ADDR, MASTER_PORT and DDP_SECRET (or the argument "
      "rendezvous=host:port), or start the ranks with srun, mpirun or torchrun",
      MpiRuntime::is_built_in() ? "" : "; this build has no MPI"));
}

}  // namespace ddp::detail
