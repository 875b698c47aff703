// SPDX-License-Identifier: Apache-2.0
#include "core/control/wire/tcp_socket.hpp"

#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/detail/check.hpp"

namespace ddp::detail {
namespace {

struct AddressListDeleter {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using AddressList = std::unique_ptr<addrinfo, AddressListDeleter>;

// The system's message, plus the setting to change if descriptors are short.
std::string network_error(int error) {
  const std::string text = std::strerror(error);
  return error != EMFILE ? text
                         : concat(text, " (this process may open ", descriptor_limit(),
                                  "; fix: raise the limit with ulimit -n)");
}

// A running call of getaddrinfo(). Its thread may outlive everybody who waits for it.
struct Resolution {
  std::mutex mutex;
  std::condition_variable ended;
  bool has_ended = false;
  int code = 0;
  int error = 0;  // errno
  AddressList list;
};

// getaddrinfo() waits for name servers for as long as resolv.conf says, so a thread calls it.
AddressList resolve(const std::string& host, int port, int flags, SteadyTime deadline,
                    std::string& why) {
  const auto result = std::make_shared<Resolution>();
  const auto ask = [result, host, port](int all_flags) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = all_flags;
    addrinfo* list = nullptr;
    const int code = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
    const int error = errno;
    const std::lock_guard lock(result->mutex);
    result->code = code;
    result->error = error;
    result->list.reset(code == 0 ? list : nullptr);
    result->has_ended = true;
    result->ended.notify_all();
  };
  ask(flags | AI_NUMERICHOST);  // asks no server
  std::unique_lock lock(result->mutex);
  if (result->code == EAI_NONAME) {
    result->has_ended = false;
    lock.unlock();
    std::thread(ask, flags).detach();
    lock.lock();
    if (!result->ended.wait_until(lock, deadline, [&] { return result->has_ended; })) {
      why = concat("host '", host,
                   "': the name service did not answer in time; fix: check this host's "
                   "/etc/resolv.conf, or give an IP address");
      return nullptr;
    }
  }
  if (result->code != 0) {
    why = concat(
        "host '", host, "': ",
        result->code == EAI_SYSTEM ? network_error(result->error) : gai_strerror(result->code));
  }
  return std::move(result->list);
}

UniqueFd make_socket(const addrinfo& address) {
  return UniqueFd(socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

void send_at_once(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

std::string numeric(const sockaddr* address) {
  char text[NI_MAXHOST] = {};
  const socklen_t size = address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  getnameinfo(address, size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST);
  return text;
}

struct LocalAddress {
  std::string interface, address;
  bool is_ipv4 = false;
};

// Addresses of interfaces that are up, without loopback and link-local ones.
std::vector<LocalAddress> local_addresses() {
  std::vector<LocalAddress> found;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) {
    return found;
  }
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    const bool usable = entry->ifa_addr != nullptr && (entry->ifa_flags & IFF_UP) != 0 &&
                        (entry->ifa_flags & IFF_LOOPBACK) == 0;
    if (!usable ||
        (entry->ifa_addr->sa_family != AF_INET && entry->ifa_addr->sa_family != AF_INET6)) {
      continue;
    }
    const std::string address = numeric(entry->ifa_addr);
    if (address.rfind("fe80", 0) != 0) {
      found.push_back({entry->ifa_name, address, entry->ifa_addr->sa_family == AF_INET});
    }
  }
  freeifaddrs(list);
  return found;
}

// The source address for a distant host. Connecting a datagram socket sends nothing.
std::string default_route_address() {
  const UniqueFd fd(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_in far{};
  far.sin_family = AF_INET;
  far.sin_port = htons(9);
  far.sin_addr.s_addr = htonl(0xC0000201);  // 192.0.2.1, reserved for documentation
  sockaddr_in own{};
  socklen_t size = sizeof(own);
  if (!fd.valid() || connect(fd.get(), reinterpret_cast<sockaddr*>(&far), sizeof(far)) != 0 ||
      getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0) {
    return {};
  }
  return numeric(reinterpret_cast<const sockaddr*>(&own));
}

}  // namespace

std::optional<Listener> listen_tcp(const std::string& address, int port, SteadyTime deadline) {
  std::string why;
  const auto list = resolve(address, port, AI_PASSIVE, deadline, why);
  if (!list) {
    throw SettingsError("control plane: cannot listen on " + why);
  }
  Listener listener{make_socket(*list), 0};
  if (!listener.fd.valid()) {
    throw SettingsError(
        concat("control plane: rank 0 has no socket to listen: ", network_error(errno)));
  }
  // A restarted job may reuse its port while old connections are still closing.
  const int on = 1;
  setsockopt(listener.fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(listener.fd.get(), list->ai_addr, list->ai_addrlen) != 0 ||
      listen(listener.fd.get(), 1024) != 0) {
    if (errno == EADDRINUSE) {
      return std::nullopt;
    }
    throw SettingsError(concat("control plane: cannot listen on address '", address, "' port ",
                               port, ": ", std::strerror(errno),
                               "; fix: run rank 0 on the host that owns this address"));
  }
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  DDP_CHECK(getsockname(listener.fd.get(), reinterpret_cast<sockaddr*>(&bound), &size) == 0);
  listener.port =
      ntohs(bound.ss_family == AF_INET ? reinterpret_cast<const sockaddr_in&>(bound).sin_port
                                       : reinterpret_cast<const sockaddr_in6&>(bound).sin6_port);
  return listener;
}

namespace {

// Tries one address until `deadline`.
UniqueFd connect_address(const addrinfo& address, SteadyTime deadline, std::string& why) {
  UniqueFd fd = make_socket(address);
  if (!fd.valid()) {
    why = network_error(errno);
    return {};
  }
  int error = 0;
  if (connect(fd.get(), address.ai_addr, address.ai_addrlen) != 0) {
    error = errno;
    if (error == EINPROGRESS) {
      if (!wait_for(fd.get(), true, deadline)) {
        why = "no answer";
        return {};
      }
      socklen_t size = sizeof(error);
      getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    }
  }
  if (error != 0) {
    why = network_error(error);
    return {};
  }
  send_at_once(fd.get());
  return fd;
}

}  // namespace

UniqueFd connect_any(const addrinfo* addresses, SteadyTime deadline, std::string& why) {
  int num_left = 0;
  for (const addrinfo* address = addresses; address != nullptr; address = address->ai_next) {
    ++num_left;
  }
  why.clear();
  for (const addrinfo* address = addresses; address != nullptr; address = address->ai_next) {
    const auto now = std::chrono::steady_clock::now();
    std::string problem;
    UniqueFd fd = connect_address(*address, now + (deadline - now) / num_left--, problem);
    if (fd.valid()) {
      return fd;
    }
    why += concat(why.empty() ? "" : "; ", numeric(address->ai_addr), ": ", problem);
  }
  return {};
}

UniqueFd connect_tcp(const std::string& host, int port, SteadyTime deadline, std::string& why) {
  const auto list = resolve(host, port, 0, deadline, why);
  return list ? connect_any(list.get(), deadline, why) : UniqueFd();
}

UniqueFd accept_tcp(int listener, std::string& why) {
  why.clear();
  for (;;) {
    UniqueFd fd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd.valid()) {
      send_at_once(fd.get());
      return fd;
    }
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      why = network_error(errno);
      return fd;
    }
    if (errno != EINTR && errno != ECONNABORTED) {
      return fd;
    }
  }
}

std::size_t descriptor_limit() {
  rlimit limit{};
  return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? static_cast<std::size_t>(limit.rlim_cur) : 1024;
}

void raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
  }
}

std::size_t count_descriptors() {
  std::error_code ignored;
  std::size_t count = 0;
  for (std::filesystem::directory_iterator it("/proc/self/fd", ignored), end; !ignored && it != end;
       it.increment(ignored)) {
    ++count;
  }
  return count;
}

IoStatus read_some(int fd, std::string& bytes, std::size_t limit) {
  char buffer[16384];
  const auto count = recv(fd, buffer, std::min(limit, sizeof(buffer)), 0);
  if (count > 0) {
    bytes.append(buffer, static_cast<std::size_t>(count));
    return IoStatus::Done;
  }
  const bool later = count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
  return later ? IoStatus::WouldBlock : IoStatus::Closed;
}

IoStatus write_some(int fd, std::string& bytes) {
  std::size_t sent = 0;
  IoStatus status = IoStatus::Done;
  while (sent < bytes.size() && status == IoStatus::Done) {
    const auto count = send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (count > 0) {
      sent += static_cast<std::size_t>(count);
    } else if (errno != EINTR) {
      status = errno == EAGAIN || errno == EWOULDBLOCK ? IoStatus::WouldBlock : IoStatus::Closed;
    }
  }
  bytes.erase(0, sent);
  return status;
}

bool wait_for(int fd, bool to_write, SteadyTime deadline) {
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) {
      return false;
    }
    pollfd watched{fd, static_cast<short>(to_write ? POLLOUT : POLLIN), 0};
    if (poll(&watched, 1, static_cast<int>(std::min<int64_t>(left.count(), 60'000))) > 0) {
      return true;
    }
  }
}

WakeEvent::WakeEvent() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!fd_.valid()) {
    throw SettingsError(
        concat("control plane: its thread has no wake-up event: ", network_error(errno)));
  }
}

void WakeEvent::notify() {
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = write(fd_.get(), &one, sizeof(one));
}

void WakeEvent::drain() {
  uint64_t count = 0;
  [[maybe_unused]] const auto got = read(fd_.get(), &count, sizeof(count));
}

std::string describe_interfaces() {
  std::string text;
  for (const LocalAddress& local : local_addresses()) {
    text += concat(text.empty() ? "" : ", ", local.interface, " ", local.address);
  }
  return text.empty() ? "none but loopback" : text;
}

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown";
}

bool can_resolve(const std::string& host, SteadyTime deadline, std::string& why) {
  return resolve(host, 0, 0, deadline, why) != nullptr;
}

bool is_loopback(const std::string& host, SteadyTime deadline) {
  std::string ignored;
  const auto list = resolve(host, 0, 0, deadline, ignored);
  if (!list) {
    return false;
  }
  const std::string address = numeric(list->ai_addr);
  return address.rfind("127.", 0) == 0 || address == "::1";
}

std::string reachable_address(SteadyTime deadline) {
  const auto own = local_addresses();
  const auto is_own = [&own](const std::string& address) {
    return std::any_of(own.begin(), own.end(),
                       [&](const LocalAddress& candidate) { return candidate.address == address; });
  };
  std::string ignored;
  const auto named = resolve(host_name(), 0, 0, deadline, ignored);
  for (const addrinfo* entry = named.get(); entry != nullptr; entry = entry->ai_next) {
    if (const auto address = numeric(entry->ai_addr); is_own(address)) {
      return address;
    }
  }
  if (const auto address = default_route_address(); is_own(address)) {
    return address;
  }
  // Bridges of containers come late in the system's list. IPv4 works for most peers.
  const auto chosen = std::find_if(own.begin(), own.end(),
                                   [](const LocalAddress& address) { return address.is_ipv4; });
  return chosen != own.end() ? chosen->address : "127.0.0.1";
}

}  // namespace ddp::detail
