// SPDX-License-Identifier: Apache-2.0
// Metrics without a Context, for tests whose ranks are threads.
#pragma once

#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "core/launch/launch_environment.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/train/metrics.hpp"
#include "support/catch.hpp"
#include "train/metrics/metrics_impl.hpp"
#include "unit/train/temporary_folder.hpp"

namespace testing {

inline ddp::Metrics metrics_on(ddp::ControlPlane& plane, const ddp::MetricsOptions& options,
                               const ddp::LaunchEnvironment& launch = {},
                               at::Device device = at::kCPU) {
  return ddp::Metrics(std::make_unique<ddp::detail::MetricsImpl>(
      plane, device, launch, options, [&plane](int64_t step) { plane.set_progress(step, ""); }));
}

/// A run in `folder`/run with a row of each two steps.
inline ddp::MetricsOptions metrics_in(const TemporaryFolder& folder) {
  ddp::MetricsOptions options;
  options.dir = folder.path();
  options.run_name = "run";
  options.log_every = 2;
  options.progress = ddp::ProgressStyle::Off;
  return options;
}

/// Reads a CSV file without quoted cells as rows of name -> text.
inline std::vector<std::map<std::string, std::string>> read_csv(const std::string& path) {
  std::istringstream in(testing::read_file(path));
  const auto split = [](const std::string& line) {
    std::vector<std::string> cells;
    std::istringstream parts(line + ",");
    for (std::string cell; std::getline(parts, cell, ',');) {
      cells.push_back(cell);
    }
    return cells;
  };
  std::string line;
  std::getline(in, line);
  const auto names = split(line);
  std::vector<std::map<std::string, std::string>> rows;
  while (std::getline(in, line)) {
    const auto cells = split(line);
    REQUIRE(cells.size() == names.size());
    auto& row = rows.emplace_back();
    for (std::size_t i = 0; i < names.size(); ++i) {
      row[names[i]] = cells[i];
    }
  }
  return rows;
}

}  // namespace testing
