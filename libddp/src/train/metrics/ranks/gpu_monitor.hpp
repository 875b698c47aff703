// SPDX-License-Identifier: Apache-2.0
// NVML's data of one GPU. NVML is loaded at run time, because machines without a driver lack it.
// The constants and structs are those of nvml.h, which a build with CUDA may lack too: it is no
// part of the compiler's and the runtime's packages. NVIDIA keeps this ABI. Torch-free.
#pragma once

#include <memory>
#include <optional>
#include <string>

namespace ddp::detail {

namespace nvml {

constexpr int kSuccess = 0;
constexpr int kInsufficientSize = 7;
constexpr int kMissing = -1;  ///< not NVML's: this driver lacks the function
constexpr unsigned int kNameBytes = 96;
constexpr unsigned int kVersionBytes = 80;
constexpr int kDieTemperature = 0;
constexpr int kSmClock = 1;
constexpr int kMemoryClock = 2;
constexpr int kPcieSent = 0;
constexpr int kPcieReceived = 1;
constexpr unsigned int kNvlinkSent = 138;  ///< field, in KiB since the driver was loaded
constexpr unsigned int kNvlinkReceived = 139;
constexpr unsigned int kAllLinks = 0xffffffff;
constexpr unsigned int kMaxLinks = 18;
constexpr int kEccCorrected = 0;
constexpr int kEccUncorrected = 1;
constexpr int kEccVolatile = 0;  ///< since the driver was loaded
constexpr int kRetiredSingleBit = 0;
constexpr int kRetiredDoubleBit = 1;

struct Utilization {
  unsigned int gpu;  ///< percent
  unsigned int memory;
};

struct Memory {  // in bytes
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

/// The loaded library.
class Library {
 public:
  /// nullptr without a driver.
  static std::unique_ptr<Library> load();
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  /// Calls NVML's `function`, whose parameters have exactly the types of `arguments`. Returns its
  /// status, or kMissing.
  template <typename... Args>
  int call(const char* function, Args... arguments) const {
    const auto address = reinterpret_cast<int (*)(Args...)>(find(function));
    return address == nullptr ? kMissing : address(arguments...);
  }

 private:
  explicit Library(void* handle) : handle_(handle) {}
  void* find(const char* function) const;

  void* const handle_;
  bool is_started_ = false;
};

/// What lowers the clocks, of nvmlClocksEventReasons: the reasons that a healthy, cooled GPU never
/// has. `reasons` may also hold idle and power.
int count_slowdowns(unsigned long long reasons);
/// "power cap, thermal slowdown"; "none".
std::string describe_throttle_reasons(unsigned long long reasons);

}  // namespace nvml

class GpuMonitor {
 public:
  /// Opens the GPU at `pci_bus_id` ("0000:65:00.0"); nullptr if NVML or the GPU is missing.
  static std::unique_ptr<GpuMonitor> open(const std::string& pci_bus_id);

  /// For functions that are not of one GPU.
  const nvml::Library& library() const { return *library_; }
  /// As Library::call, with the GPU's handle before `arguments`.
  template <typename... Args>
  int call(const char* function, Args... arguments) const {
    return library_->call(function, device_, arguments...);
  }
  /// The one number that `function` writes after `arguments`; nothing if this GPU or driver does
  /// not report it.
  template <typename Number = unsigned int, typename... Args>
  std::optional<double> number(const char* function, Args... arguments) const {
    Number value{};
    const bool good = call(function, arguments..., &value) == nvml::kSuccess;
    return good ? std::optional(static_cast<double>(value)) : std::nullopt;
  }

  /// As the driver names it; " MIG" follows if the GPU is split into instances. Empty if unknown.
  std::string name() const;
  std::optional<double> power_watts() const;

 private:
  GpuMonitor(std::unique_ptr<nvml::Library> library, void* device);

  std::unique_ptr<nvml::Library> library_;
  void* device_;
};

}  // namespace ddp::detail
