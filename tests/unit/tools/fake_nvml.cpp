// SPDX-License-Identifier: Apache-2.0
// Signatures and numbers are those of NVML's reference guide.
#include "fake_nvml.hpp"

#include <cstdio>
#include <cstring>

extern "C" {

unsigned int fake_nvml_num_links = 0;
unsigned int fake_nvml_links_down = 0;
unsigned long long fake_nvml_sent = 0;
unsigned int fake_nvml_mig_mode = 0;

constexpr int kOk = 0;
constexpr int kInvalidArgument = 2;
constexpr int kNotSupported = 3;

struct Utilization {
  unsigned int gpu, memory;
};
struct Memory {
  unsigned long long total, free, used;
};
struct FieldValue {
  unsigned int id, scope;
  long long timestamp, latency;
  int type, result;
  unsigned long long value;
};

int nvmlInit_v2() {
  return kOk;
}

int nvmlShutdown() {
  return kOk;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, void** device) {
  static int gpu;
  *device = &gpu;
  return std::strcmp(bus_id, "0000:65:00.0") == 0 ? kOk : kInvalidArgument;
}

int nvmlDeviceGetNvLinkState(void* device, unsigned int link, unsigned int* is_active) {
  if (device == nullptr || is_active == nullptr || link >= 18) {
    return kInvalidArgument;
  }
  if (link >= fake_nvml_num_links) {
    return kNotSupported;
  }
  *is_active = (fake_nvml_links_down >> link & 1) == 0 ? 1 : 0;
  return kOk;
}

int nvmlDeviceGetTotalEccErrors(void* device, int error_type, int counter_type,
                                unsigned long long* count) {
  if (device == nullptr || counter_type != 0) {  // 0: since the driver was loaded
    return kInvalidArgument;
  }
  *count = error_type == 1 ? 7 : 40;  // 1: uncorrected
  return kOk;
}

int nvmlDeviceGetName(void*, char* name, unsigned int length) {
  return std::snprintf(name, length, "A GPU") > 0 ? kOk : kInvalidArgument;
}

int nvmlDeviceGetMigMode(void*, unsigned int* current, unsigned int* pending) {
  *current = *pending = fake_nvml_mig_mode;
  return kOk;
}

int nvmlDeviceGetUtilizationRates(void*, Utilization* percent) {
  *percent = {73, 12};
  return kOk;
}

int nvmlDeviceGetTotalEnergyConsumption(void*, unsigned long long* millijoules) {
  *millijoules = 5'000'000'000;
  return kOk;
}

int nvmlDeviceGetPowerUsage(void*, unsigned int* milliwatts) {
  *milliwatts = 450'500;
  return kOk;
}

int nvmlDeviceGetMemoryInfo(void*, Memory* bytes) {
  *bytes = {80ULL << 30, 20ULL << 30, 60ULL << 30};
  return kOk;
}

int nvmlDeviceGetTemperature(void*, int sensor, unsigned int* celsius) {
  *celsius = 61;
  return sensor == 0 ? kOk : kInvalidArgument;
}

int nvmlDeviceGetClockInfo(void*, int type, unsigned int* mhz) {
  *mhz = type == 1 ? 1980 : 2619;  // of the SMs, of the memory
  return type == 1 || type == 2 ? kOk : kInvalidArgument;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void*, unsigned long long* reasons) {
  *reasons = 0x24;
  return kOk;
}

int nvmlDeviceGetPcieThroughput(void*, int counter, unsigned int* kilobytes_per_second) {
  *kilobytes_per_second = counter == 0 ? 3000 : 1500;  // sent, received
  return counter == 0 || counter == 1 ? kOk : kInvalidArgument;
}

int nvmlDeviceGetFieldValues(void*, int count, FieldValue* values) {
  for (int i = 0; i < count; ++i) {
    const bool is_known = (values[i].id == 138 || values[i].id == 139) && values[i].scope == ~0U;
    values[i].result = is_known ? kOk : kNotSupported;
    values[i].value = values[i].id == 138 ? fake_nvml_sent : 3 * fake_nvml_sent;
  }
  return kOk;
}
}
