// SPDX-License-Identifier: Apache-2.0
#include "train/device_sensors.hpp"

#include <dlfcn.h>

#include <utility>

namespace ddp::detail {
namespace {

// The used declarations of nvml.h, which may not be installed; NVIDIA guarantees the ABI.
struct Utilization {
  unsigned int gpu;
  unsigned int memory;
};
constexpr unsigned int kNameBytes = 96;

}  // namespace

struct GpuMonitor::Library {
  void* handle = nullptr;
  bool started = false;
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*find_device)(const char*, void**) = nullptr;
  int (*get_name)(void*, char*, unsigned int) = nullptr;
  int (*get_utilization)(void*, Utilization*) = nullptr;
  int (*get_power)(void*, unsigned int*) = nullptr;
  int (*get_energy)(void*, unsigned long long*) = nullptr;

  bool load() {
    handle = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      return false;
    }
    const auto find = [this](auto& function, const char* symbol) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(::dlsym(handle, symbol));
      return function != nullptr;
    };
    const bool complete = find(init, "nvmlInit_v2") && find(shutdown, "nvmlShutdown") &&
                          find(find_device, "nvmlDeviceGetHandleByPciBusId_v2");
    find(get_name, "nvmlDeviceGetName");
    find(get_utilization, "nvmlDeviceGetUtilizationRates");
    find(get_power, "nvmlDeviceGetPowerUsage");
    find(get_energy, "nvmlDeviceGetTotalEnergyConsumption");
    started = complete && init() == 0;
    return started;
  }
  ~Library() {
    if (started) {
      shutdown();
    }
    if (handle != nullptr) {
      ::dlclose(handle);
    }
  }
};

GpuMonitor::GpuMonitor(std::unique_ptr<Library> library, void* device)
    : library_(std::move(library)), device_(device) {}
GpuMonitor::~GpuMonitor() = default;

std::unique_ptr<GpuMonitor> GpuMonitor::open(const std::string& pci_bus_id) {
  auto library = std::make_unique<Library>();
  void* device = nullptr;
  if (!library->load() || library->find_device(pci_bus_id.c_str(), &device) != 0) {
    return nullptr;
  }
  return std::unique_ptr<GpuMonitor>(new GpuMonitor(std::move(library), device));
}

void* GpuMonitor::find(const char* symbol) const {
  return ::dlsym(library_->handle, symbol);
}

std::string GpuMonitor::name() const {
  char text[kNameBytes] = "";
  return library_->get_name && library_->get_name(device_, text, kNameBytes) == 0 ? text : "";
}

double GpuMonitor::utilisation_percent() const {
  Utilization value{};
  const bool good = library_->get_utilization && library_->get_utilization(device_, &value) == 0;
  return good ? value.gpu : NAN;
}

double GpuMonitor::power_watts() const {
  unsigned int milliwatts = 0;
  const bool good = library_->get_power && library_->get_power(device_, &milliwatts) == 0;
  return good ? milliwatts / 1000.0 : NAN;
}

double GpuMonitor::energy_joules() const {
  unsigned long long millijoules = 0;
  const bool good = library_->get_energy && library_->get_energy(device_, &millijoules) == 0;
  return good ? static_cast<double>(millijoules) / 1000.0 : NAN;
}

}  // namespace ddp::detail
