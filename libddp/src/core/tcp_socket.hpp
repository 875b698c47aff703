// SPDX-License-Identifier: Apache-2.0
// The few socket calls the control plane needs. All sockets are non-blocking and closed on exec.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <utility>

struct addrinfo;

namespace ddp::detail {

using SteadyTime = std::chrono::steady_clock::time_point;

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

struct Listener {
  UniqueFd fd;
  int port = 0;
};

/// Listens on exactly this address. Returns none where the port is taken; throws SettingsError
/// where the address is not one of this host.
std::optional<Listener> listen_tcp(const std::string& address, int port);

/// Connects to the first address of `host` that answers, waiting until `deadline` at most. On
/// failure the result is invalid and `why` says why.
UniqueFd connect_tcp(const std::string& host, int port, SteadyTime deadline, std::string& why);

/// Tries the addresses in their order, each for an equal part of the time that is left. On failure
/// the result is invalid and `why` names each address and what was wrong with it.
UniqueFd connect_any(const addrinfo* addresses, SteadyTime deadline, std::string& why);

/// Next connection. An invalid one where none waits (`why` is empty) or where one waits and cannot
/// be taken for want of a descriptor or memory (`why` says so).
UniqueFd accept_tcp(int listener, std::string& why);

/// How many files this process may have open now (the soft limit, `ulimit -n`).
std::size_t descriptor_limit();
/// Raises the soft limit of open files to the hard one.
void raise_descriptor_limit();
/// How many files this process has open.
std::size_t count_descriptors();

enum class IoStatus { Done, WouldBlock, Closed };

/// Appends what has arrived to `bytes`, at most `limit` bytes.
IoStatus read_some(int fd, std::string& bytes, std::size_t limit);
/// Sends from `bytes` and removes what was sent.
IoStatus write_some(int fd, std::string& bytes);

/// Waits until `fd` can be read (or written), false when `deadline` passed.
bool wait_for(int fd, bool to_write, SteadyTime deadline);

/// A pipe of one: any thread wakes another out of poll().
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

/// Whether `host` resolves to a loopback address here, as many systems map their own name.
bool is_loopback(const std::string& host);

/// The address of this host that other hosts reach: what its name resolves to where that is one of
/// its interfaces, else the interface of the default route, else loopback.
std::string reachable_address();

}  // namespace ddp::detail
