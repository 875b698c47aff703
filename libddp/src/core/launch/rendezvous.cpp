// SPDX-License-Identifier: Apache-2.0
#include "core/launch/rendezvous.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "core/control/wire/authentication.hpp"
#include "core/files/file_ops.hpp"

namespace ddp::detail {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kMaxContactBytes = 4096;

std::string contact_path(const std::string& folder, const std::string& key) {
  return folder + "/.ddp_rendezvous." + key;
}

class FixedRendezvous final : public Rendezvous {
 public:
  FixedRendezvous(std::string host, int port, std::string secret, const std::string& bind_address)
      : host_(std::move(host)),
        port_(port),
        secret_(std::move(secret)),
        bind_address_(bind_address.empty() ? host_ : bind_address) {}

  std::string bind_address() override { return bind_address_; }
  int bind_port() override { return port_; }
  std::string secret() override { return secret_; }
  std::string exchange(int, const std::string&, std::chrono::milliseconds) override {
    return concat(host_, ' ', port_);
  }

 private:
  const std::string host_;
  const int port_;
  const std::string secret_;
  const std::string bind_address_;
};

class FileRendezvous final : public Rendezvous {
 public:
  FileRendezvous(const std::string& folder, const std::string& key, std::string bind_address)
      : folder_(folder),
        key_(key),
        path_(contact_path(folder, key)),
        bind_address_(std::move(bind_address)) {}

  ~FileRendezvous() override {
    if (written_) {
      unlink(path_.c_str());
    }
  }

  std::string bind_address() override { return bind_address_; }

  std::string exchange(int rank, const std::string& contact,
                       std::chrono::milliseconds timeout) override {
    if (rank == 0) {
      publish(contact);
      return contact;
    }
    const auto deadline = Clock::now() + timeout;
    for (;;) {
      std::string why;
      if (auto found = read_contact_file(folder_, key_, why); !found.empty()) {
        return found;
      }
      if (Clock::now() >= deadline) {
        throw PeerLostError(concat("rendezvous: rank 0 did not write its address within ",
                                   timeout.count(), " ms (", why,
                                   "); fix: use a folder that all nodes share"));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }

 private:
  // Written under a random name and renamed, so that no reader sees a partial file.
  void publish(const std::string& contact) {
    const std::string temporary = path_ + "." + to_hex(random_bytes(8));
    const int fd =
        open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    const bool whole = fd >= 0 && write(fd, contact.data(), contact.size()) ==
                                      static_cast<ssize_t>(contact.size());
    const bool synced = whole && fsync(fd) == 0;
    if (fd >= 0) {
      ::close(fd);
    }
    if (!synced || rename(temporary.c_str(), path_.c_str()) != 0) {
      const int error = errno;
      unlink(temporary.c_str());
      throw SettingsError(concat("rendezvous: cannot write in folder '", folder_,
                                 "': ", std::strerror(error),
                                 "; fix: set context.control_plane.rendezvous_folder to a "
                                 "writable folder that all nodes share"));
    }
    written_ = true;
  }

  const std::string folder_, key_, path_;
  const std::string bind_address_;
  bool written_ = false;
};

}  // namespace

std::shared_ptr<Rendezvous> make_fixed_rendezvous(const std::string& host, int port,
                                                  const std::string& secret,
                                                  const std::string& bind_address) {
  if (secret.empty()) {
    throw SettingsError(concat(
        "ranks that meet at a known address (", host, ":", port,
        ") need a common secret; fix: set DDP_SECRET to the same random text on all ranks, for "
        "example DDP_SECRET=$(openssl rand -hex 32), or start them with torchrun, srun or "
        "mpirun"));
  }
  return std::make_shared<FixedRendezvous>(host, port, secret, bind_address);
}

std::string read_contact_file(const std::string& folder, const std::string& key, std::string& why) {
  const std::string path = contact_path(folder, key);
  const int fd = open_to_read(path, why, Links::Refuse);
  if (fd < 0) {
    why = path + ": " + why;
    return {};
  }
  struct stat info {};
  std::string text(kMaxContactBytes, '\0');
  const bool trusted =
      fstat(fd, &info) == 0 && info.st_uid == geteuid() && (info.st_mode & 077) == 0;
  const auto count = trusted ? ::read(fd, text.data(), text.size()) : 0;
  ::close(fd);
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  if (!trusted) {
    why = path + ": it belongs to another user, or other users may read it";
  } else if (text.empty()) {
    why = path + ": it cannot be read";
  }
  return text;
}

std::shared_ptr<Rendezvous> make_file_rendezvous(const std::string& folder, const std::string& key,
                                                 const std::string& bind_address) {
  return std::make_shared<FileRendezvous>(folder, key, bind_address);
}

}  // namespace ddp::detail
