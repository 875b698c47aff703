// SPDX-License-Identifier: Apache-2.0
#include "checks.hpp"

#include <algorithm>

namespace cluster_check {
namespace {

constexpr double kFixed = -1;
constexpr double kSpeedMargin = 0.05;
constexpr double kLinkMargin = 0.15;  // other jobs share the network
constexpr double kLatencyMargin = 1.0;

void add_health(std::vector<Check>& list) {
  const auto add = [&](const char* name, Limit limit, const char* unit, const char* doc,
                       double margin = kFixed) {
    list.push_back({"health", name, limit, unit, doc, margin});
  };
  add("gpus", Limit::Min, "", "GPUs of the node", 0);
  add("gpus_missing", Limit::Max, "", "fewer than ranks, or than SLURM_GPUS_ON_NODE");
  add("distinct_gpu_counts", Limit::Max, "", "different numbers of GPUs among the nodes");
  add("distinct_versions", Limit::Max, "", "different sets of driver and library versions");
  add("uncorrected_ecc_errors", Limit::Max, "", "since the driver was loaded");
  add("corrected_ecc_errors", Limit::Max, "", "since the driver was loaded");
  add("retired_pages", Limit::Max, "", "retired memory pages, or rows remapped after an error");
  add("row_remaps_pending", Limit::Max, "", "1: a row remap failed or waits for a reset");
  add("slowdown_reasons", Limit::Max, "", "reasons for lower clocks, except idle and power");
  add("pcie_generation", Limit::Min, "", "of the GPU's link, as negotiated at most", 0);
  add("pcie_width", Limit::Min, "lanes", "of the GPU's link", 0);
  add("nvlinks_down", Limit::Max, "", "inactive NVLinks of the GPU");
  add("infiniband_ports", Limit::Min, "", "active InfiniBand ports of the node", 0);
  add("gpu_memory_free", Limit::Min, "%", "before the checks");
  add("host_memory_free", Limit::Min, "GiB", "available memory of the node");
  add("open_files", Limit::Min, "", "limit of open files (ulimit -n)");
  add("locked_memory", Limit::Min, "GiB", "limit of locked memory (ulimit -l)");
  add("shm_free", Limit::Min, "GiB", "free space of /dev/shm");
  add("clock_skew", Limit::Max, "ms", "least difference to rank 0's clock");
}

void add_gpu(std::vector<Check>& list) {
  const auto add = [&](const std::string& name, const char* unit, const std::string& doc) {
    list.push_back({"gpu", name, Limit::Min, unit, doc, kSpeedMargin});
  };
  for (const char* dtype : {"bf16", "fp16", "tf32", "fp8"}) {
    for (const long size : {4096L, 8192L, 16384L}) {
      add(gemm_name(dtype, size), "TFLOP/s", "sustained matrix product");
    }
  }
  add("gemm_bf16_best", "TFLOP/s", "the best sustained bf16 product of the sizes");
  add(gemm_name("fp32", 512), "TFLOP/s", "matrix product of CPU ranks");
  add("device_copy", "TB/s", "copy on the device, bytes read and written");
  add("host_to_device", "GB/s", "from pinned memory");
  add("device_to_host", "GB/s", "to pinned memory");
  list.push_back({"gpu", "slowdown_under_load", Limit::Max, "",
                  "reasons for lower clocks during the products, except power", kFixed});
  list.push_back({"gpu", "percent_below_median", Limit::Max, "%",
                  "distance of a rank from the median, for every row of this group", kFixed});
}

void add_rest(std::vector<Check>& list) {
  const auto add = [&](const char* group, const char* name, const char* unit, const char* doc,
                       double margin) {
    list.push_back({group, name, Limit::Min, unit, doc, margin});
  };
  list.push_back({"collectives", "wrong_sums", Limit::Max, "", "ranks with a wrong sum", kFixed});
  list.push_back({"collectives", "all_reduce_latency", Limit::Max, "us",
                  "all-reduce of 1 KiB, on the slowest rank", kLatencyMargin});
  add("collectives", "all_reduce_busbw", "GB/s", "at the largest size", kLinkMargin);
  add("collectives", "all_gather_busbw", "GB/s", "at the largest size", kLinkMargin);
  add("collectives", "reduce_scatter_busbw", "GB/s", "at the largest size", kLinkMargin);
  add("collectives", "pair_same_node", "GB/s", "slowest link inside a node", kLinkMargin);
  add("collectives", "pair_other_node", "GB/s", "slowest link between nodes", kLinkMargin);
  list.push_back({"collectives", "pair_percent_below_median", Limit::Max, "%",
                  "distance of the slowest link from the median of its kind", kFixed});
  list.push_back({"training", "not_learning", Limit::Max, "",
                  "models whose loss did not fall, or was no number", kFixed});
  add("training", "encoder_fp32", "tokens/s", "reference encoder in strict float32, per rank",
      kSpeedMargin);
  add("training", "encoder_bf16", "tokens/s", "reference encoder in bf16, per rank", kSpeedMargin);
  add("training", "resnet", "images/s", "ResNet-50 (CPU: small ResNet-18), per rank", kSpeedMargin);
}

}  // namespace

std::string gemm_name(const std::string& dtype, long size) {
  return "gemm_" + dtype + "_" + std::to_string(size);
}

const std::vector<Check>& checks() {
  static const auto list = [] {
    std::vector<Check> all;
    add_health(all);
    add_gpu(all);
    add_rest(all);
    return all;
  }();
  return list;
}

const Check* find_check(const std::string& group, const std::string& name) {
  const auto& all = checks();
  const auto found = std::find_if(all.begin(), all.end(), [&](const Check& check) {
    return check.group == group && check.name == name;
  });
  return found == all.end() ? nullptr : &*found;
}

}  // namespace cluster_check
