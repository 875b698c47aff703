// SPDX-License-Identifier: Apache-2.0
// What a check found, and what the report of all ranks holds.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace cluster_check {

constexpr int kAllRanks = -1;

enum class Verdict {
  Pass,
  Fail,
  NotAvailable,  ///< this host, container or device cannot tell the value
  Unchecked      ///< no threshold
};

/// One value of one rank, or of all ranks together.
struct Row {
  std::string group{};  ///< "health", "gpu", "collectives" or "training"
  std::string name{};
  std::optional<double> value{};  ///< nothing: not available
  std::string unit{};
  std::string text{};    ///< details for a reader
  int rank = kAllRanks;  ///< node rows: the node's first rank
  // Set on rank 0 when the rows of all ranks are there:
  std::optional<double> percent_below_median{};  ///< of the ranks' values
  std::string threshold{};                       ///< "at least 650"; empty: none
  Verdict verdict = Verdict::Unchecked;

  friend auto message_fields(Row& row) {
    return std::tie(row.group, row.name, row.value, row.unit, row.text, row.rank);
  }
};

/// One size of one collective, defined as in nccl-tests.
struct CollectivePoint {
  std::string operation;
  int64_t bytes = 0;
  double microseconds = 0;  ///< of one call, on the slowest rank
  double algbw = 0;         ///< GB/s
  double busbw = 0;         ///< GB/s
};

/// GB/s from rank [i] to rank [j]; 0 on the diagonal. Empty: not measured.
using PairMatrix = std::vector<std::vector<double>>;

struct RankInfo {
  std::string host;
  int node_rank = 0;
  int local_rank = 0;
  std::string device;    ///< "cuda:0", "cpu"
  std::string gpu_name;  ///< empty on the CPU
  std::string launch;    ///< who started it
  std::string backend;

  friend auto message_fields(RankInfo& info) {
    return std::tie(info.host, info.node_rank, info.local_rank, info.device, info.gpu_name,
                    info.launch, info.backend);
  }
};

struct Report {
  std::vector<RankInfo> ranks;
  std::vector<Row> rows;
  std::vector<CollectivePoint> points;
  PairMatrix pairs;
  int64_t pair_bytes = 0;
  std::string thresholds;                 ///< their name or file
  int num_met = 0;                        ///< thresholds that every value meets
  std::vector<std::string> not_measured;  ///< thresholds without a value, as "health.gpus"
  std::vector<std::string> nccl;          ///< NCCL's variables of rank 0, as "NCCL_NVLS_ENABLE=0"
  std::string versions;                   ///< rank 0's
  std::string started;                    ///< UTC
  double seconds = 0;
  bool quick = false;
};

}  // namespace cluster_check
