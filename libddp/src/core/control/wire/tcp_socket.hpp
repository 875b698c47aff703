// SPDX-License-Identifier: Apache-2.0
// Socket calls of the control plane. All sockets are non-blocking and close on exec.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "core/control/wire/unique_fd.hpp"

struct addrinfo;

namespace ddp::detail {

using SteadyTime = std::chrono::steady_clock::time_point;

struct Listener {
  UniqueFd fd;
  int port = 0;
};

/// Listens on exactly this address. Returns nothing if the port is taken. Throws SettingsError if
/// the address does not belong to this host, or its name is not resolved before `deadline`.
std::optional<Listener> listen_tcp(const std::string& address, int port,
                                   SteadyTime deadline = SteadyTime::max());

/// Connects to the first address of `host` that answers before `deadline`. On failure returns an
/// invalid descriptor and sets `why`.
UniqueFd connect_tcp(const std::string& host, int port, SteadyTime deadline, std::string& why);

/// Tries the addresses in order; each gets an equal part of the remaining time. On failure returns
/// an invalid descriptor and `why` names each address and its error.
UniqueFd connect_any(const addrinfo* addresses, SteadyTime deadline, std::string& why);

/// Accepts the next connection. Returns an invalid descriptor if none is pending (`why` is empty),
/// or if descriptors or memory are short (`why` says so).
UniqueFd accept_tcp(int listener, std::string& why);

/// This process's limit of open files (the soft limit, `ulimit -n`).
std::size_t descriptor_limit();
/// Raises the soft limit of open files to the hard one.
void raise_descriptor_limit();
/// Number of files this process has open.
std::size_t count_descriptors();

enum class IoStatus { Done, WouldBlock, Closed };

/// Appends received bytes to `bytes`, at most `limit` bytes.
IoStatus read_some(int fd, std::string& bytes, std::size_t limit);
/// Sends bytes from the front of `bytes` and removes them.
IoStatus write_some(int fd, std::string& bytes);

/// Waits until `fd` is readable (or writable). Returns false at `deadline`.
bool wait_for(int fd, bool to_write, SteadyTime deadline);

/// Any thread wakes another one from poll() through an eventfd.
class WakeEvent {
 public:
  WakeEvent();
  int fd() const { return fd_.get(); }
  void notify();
  void drain();

 private:
  UniqueFd fd_;
};

std::string host_name();

/// Whether the name service knows `host`. On failure or at `deadline` sets `why`.
bool can_resolve(const std::string& host, SteadyTime deadline, std::string& why);

/// Whether `host` resolves to a loopback address on this host before `deadline`. Many systems map
/// their own name to one.
bool is_loopback(const std::string& host, SteadyTime deadline);

/// "eth0 10.0.0.5, docker0 172.17.0.1": the interfaces that are up, without loopback. For messages.
std::string describe_interfaces();

/// This host's address for other hosts: its name's address if that belongs to an interface and is
/// resolved before `deadline`, else the interface of the default route, else loopback.
std::string reachable_address(SteadyTime deadline);

}  // namespace ddp::detail
