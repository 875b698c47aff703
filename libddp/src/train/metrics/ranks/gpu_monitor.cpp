// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/ranks/gpu_monitor.hpp"

#include <dlfcn.h>

#include <bit>
#include <utility>

namespace ddp::detail {

namespace nvml {
namespace {

struct Reason {
  unsigned long long bit;  // nvmlClocksEventReasons
  const char* name;
  bool is_slowdown;
};
constexpr Reason kReasons[] = {{0x1, "idle", false},
                               {0x2, "application clocks", false},
                               {0x4, "power cap", false},
                               {0x8, "hardware slowdown", true},
                               {0x10, "sync boost", false},
                               {0x20, "thermal slowdown", true},
                               {0x40, "hardware thermal slowdown", true},
                               {0x80, "power brake", true},
                               {0x100, "display clocks", false}};

}  // namespace

std::unique_ptr<Library> Library::load() {
  void* handle = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return nullptr;
  }
  std::unique_ptr<Library> library(new Library(handle));
  library->is_started_ = library->call("nvmlInit_v2") == kSuccess;
  return library->is_started_ ? std::move(library) : nullptr;
}

Library::~Library() {
  if (is_started_) {
    call("nvmlShutdown");
  }
  ::dlclose(handle_);
}

void* Library::find(const char* function) const {
  return ::dlsym(handle_, function);
}

int count_slowdowns(unsigned long long reasons) {
  unsigned long long bits = 0;
  for (const auto& reason : kReasons) {
    bits |= reason.is_slowdown ? reason.bit : 0;
  }
  return std::popcount(reasons & bits);
}

std::string describe_throttle_reasons(unsigned long long reasons) {
  std::string text;
  for (const auto& reason : kReasons) {
    if ((reasons & reason.bit) != 0) {
      text += (text.empty() ? "" : ", ") + std::string(reason.name);
    }
  }
  return text.empty() ? "none" : text;
}

}  // namespace nvml

GpuMonitor::GpuMonitor(std::unique_ptr<nvml::Library> library, void* device)
    : library_(std::move(library)), device_(device) {}

std::unique_ptr<GpuMonitor> GpuMonitor::open(const std::string& pci_bus_id) {
  auto library = nvml::Library::load();
  void* device = nullptr;
  const bool is_found =
      library != nullptr && library->call("nvmlDeviceGetHandleByPciBusId_v2", pci_bus_id.c_str(),
                                          &device) == nvml::kSuccess;
  return std::unique_ptr<GpuMonitor>(is_found ? new GpuMonitor(std::move(library), device)
                                              : nullptr);
}

std::string GpuMonitor::name() const {
  char text[nvml::kNameBytes] = "";
  const int status = call("nvmlDeviceGetName", &text[0], nvml::kNameBytes);
  unsigned int mig = 0, mig_after_reset = 0;
  const bool is_split =
      call("nvmlDeviceGetMigMode", &mig, &mig_after_reset) == nvml::kSuccess && mig != 0;
  return status == nvml::kSuccess ? std::string(text) + (is_split ? " MIG" : "") : "";
}

std::optional<double> GpuMonitor::power_watts() const {
  const auto milliwatts = number("nvmlDeviceGetPowerUsage");
  return milliwatts ? std::optional(*milliwatts / 1000) : std::nullopt;
}

}  // namespace ddp::detail
