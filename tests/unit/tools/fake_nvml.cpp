// SPDX-License-Identifier: Apache-2.0
// Signatures and numbers are those of NVML's reference guide.
#include "fake_nvml.hpp"

#include <cstring>

extern "C" {

unsigned int fake_nvml_num_links = 0;
unsigned int fake_nvml_links_down = 0;

constexpr int kOk = 0;
constexpr int kInvalidArgument = 2;
constexpr int kNotSupported = 3;

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
}
