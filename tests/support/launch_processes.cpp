// SPDX-License-Identifier: Apache-2.0
#include "support/launch_processes.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

namespace ddp::test {
namespace {

struct Stat {
  char state = 'Z';
  pid_t parent = 0;
};

Stat read_stat(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  Stat stat;
  // The name in parentheses may itself hold blanks and parentheses.
  const auto end = text.rfind(')');
  if (end != std::string::npos) {
    std::istringstream(text.substr(end + 1)) >> stat.state >> stat.parent;
  }
  return stat;
}

std::string command_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/cmdline");
  std::ostringstream text;
  text << file.rdbuf();
  std::string command = text.str();
  std::replace(command.begin(), command.end(), '\0', ' ');
  return command;
}

bool is_launcher_command(const std::string& command) {
  const auto program = std::filesystem::path(command.substr(0, command.find(' '))).filename();
  return program == "mpirun" || program == "mpiexec" || program == "orterun" ||
         program == "orted" || command.find(" --wrap ") != std::string::npos;
}

}  // namespace

std::vector<Process> descendants(pid_t ancestor) {
  std::map<pid_t, Stat> stats;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isdigit(c); })) {
      const pid_t pid = std::stoi(name);
      stats[pid] = read_stat(pid);
    }
  }
  std::set<pid_t> below = {ancestor};
  for (bool grown = true; grown;) {
    grown = false;
    for (const auto& [pid, stat] : stats) {
      grown = (below.count(stat.parent) > 0 && below.insert(pid).second) || grown;
    }
  }
  std::vector<Process> found;
  for (const pid_t pid : below) {
    if (pid != ancestor && stats[pid].state != 'Z' && stats[pid].state != 'X') {
      const std::string command = command_of(pid);
      found.push_back({pid, command, is_launcher_command(command)});
    }
  }
  return found;
}

int visible_gpus() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver == nullptr) {
    return 0;
  }
  const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  const auto count_devices = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDeviceGetCount"));
  int count = 0;
  if (init == nullptr || count_devices == nullptr || init(0) != 0 || count_devices(&count) != 0) {
    return 0;
  }
  return count;
}

}  // namespace ddp::test
