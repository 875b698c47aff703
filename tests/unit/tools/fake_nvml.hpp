// SPDX-License-Identifier: Apache-2.0
// A library in NVML's place, so that a machine without a driver can test what reads it.
#pragma once

extern "C" {

/// Links that the one GPU has, and a bit for each link that is down.
extern unsigned int fake_nvml_num_links;
extern unsigned int fake_nvml_links_down;
/// KiB that all links sent; they received three times as much.
extern unsigned long long fake_nvml_sent;
/// 1: the GPU is split into instances (MIG).
extern unsigned int fake_nvml_mig_mode;
}
