// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/ranks/device_sensors.hpp"

#include <dlfcn.h>

#include <utility>

namespace ddp::detail {
namespace {

constexpr unsigned int kNameBytes = 96;  // of nvml.h
constexpr int kDieTemperature = 0;
constexpr int kSmClock = 1;
constexpr int kMemoryClock = 2;
constexpr int kPcieSent = 0;
constexpr int kPcieReceived = 1;
constexpr unsigned int kNvlinkSent = 138;  // KiB since the driver was loaded
constexpr unsigned int kNvlinkReceived = 139;
constexpr unsigned int kAllLinks = 0xffffffff;

}  // namespace

// The used declarations of nvml.h, which may not be installed; NVIDIA guarantees the ABI.
struct GpuMonitor::Library {
  // Not in the anonymous namespace: in a unity build GCC 13 crashes on a member of such a type.
  struct Utilization {
    unsigned int gpu;
    unsigned int memory;
  };
  struct Memory {
    unsigned long long total;
    unsigned long long free;
    unsigned long long used;
  };
  struct FieldValue {
    unsigned int field;
    unsigned int scope;
    long long timestamp;
    long long latency;
    int type;
    int result;
    unsigned long long value;
  };
  void* handle = nullptr;
  bool started = false;
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*find_device)(const char*, void**) = nullptr;
  int (*get_name)(void*, char*, unsigned int) = nullptr;
  int (*get_utilization)(void*, Utilization*) = nullptr;
  int (*get_power)(void*, unsigned int*) = nullptr;
  int (*get_energy)(void*, unsigned long long*) = nullptr;
  int (*get_memory)(void*, Memory*) = nullptr;
  int (*get_temperature)(void*, int, unsigned int*) = nullptr;
  int (*get_clock)(void*, int, unsigned int*) = nullptr;
  int (*get_pcie)(void*, int, unsigned int*) = nullptr;
  int (*get_fields)(void*, int, FieldValue*) = nullptr;

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
    find(get_memory, "nvmlDeviceGetMemoryInfo");
    find(get_temperature, "nvmlDeviceGetTemperature");
    find(get_clock, "nvmlDeviceGetClockInfo");
    find(get_pcie, "nvmlDeviceGetPcieThroughput");
    find(get_fields, "nvmlDeviceGetFieldValues");
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
  Library::Utilization value{};
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

double GpuMonitor::memory_total_gib() const {
  Library::Memory memory{};
  const bool good = library_->get_memory && library_->get_memory(device_, &memory) == 0;
  return good ? static_cast<double>(memory.total) / (1 << 30) : NAN;
}

double GpuMonitor::temperature_celsius() const {
  unsigned int degrees = 0;
  const bool good = library_->get_temperature &&
                    library_->get_temperature(device_, kDieTemperature, &degrees) == 0;
  return good ? degrees : NAN;
}

double GpuMonitor::clock_mhz(int type) const {
  unsigned int mhz = 0;
  const bool good = library_->get_clock && library_->get_clock(device_, type, &mhz) == 0;
  return good ? mhz : NAN;
}

double GpuMonitor::sm_clock_mhz() const {
  return clock_mhz(kSmClock);
}

double GpuMonitor::memory_clock_mhz() const {
  return clock_mhz(kMemoryClock);
}

double GpuMonitor::pcie_mb_per_second() const {
  unsigned int sent = 0, received = 0;  // kB/s, over 20 ms each
  const bool good = library_->get_pcie && library_->get_pcie(device_, kPcieSent, &sent) == 0 &&
                    library_->get_pcie(device_, kPcieReceived, &received) == 0;
  return good ? (sent + double(received)) / 1000 : NAN;
}

double GpuMonitor::nvlink_bytes() const {
  Library::FieldValue values[2] = {};
  values[0].field = kNvlinkSent;
  values[1].field = kNvlinkReceived;
  values[0].scope = values[1].scope = kAllLinks;
  const bool good = library_->get_fields && library_->get_fields(device_, 2, values) == 0 &&
                    values[0].result == 0 && values[1].result == 0;
  return good ? 1024 * (static_cast<double>(values[0].value) + static_cast<double>(values[1].value))
              : NAN;
}

GpuNumbers GpuReader::read(TimePoint now) {
  numbers_.energy_joules = gpu_.energy_joules();
  numbers_.utilisation_percent = gpu_.utilisation_percent();
  if (now - others_at_ < kOthersPeriod) {
    return numbers_;
  }
  const double seconds = std::chrono::duration<double>(now - others_at_).count();
  const double bytes = gpu_.nvlink_bytes();
  others_at_ = now;
  numbers_.memory_total_gib = gpu_.memory_total_gib();
  numbers_.temperature_c = gpu_.temperature_celsius();
  numbers_.power_w = gpu_.power_watts();
  numbers_.sm_clock_mhz = gpu_.sm_clock_mhz();
  numbers_.memory_clock_mhz = gpu_.memory_clock_mhz();
  numbers_.pcie_mb_per_second = gpu_.pcie_mb_per_second();
  numbers_.nvlink_mb_per_second = (bytes - std::exchange(nvlink_bytes_, bytes)) / seconds / 1e6;
  return numbers_;
}

}  // namespace ddp::detail
