// SPDX-License-Identifier: Apache-2.0
// Metrics that a program names itself, which stay on the device between log lines.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "ddp/train/metrics.hpp"
#include "train/metrics/custom_numbers.hpp"

namespace ddp::detail {

/// Throws SettingsError that names the metric unless `value` has one element.
void check_one_element(const std::string& name, const at::Tensor& value);

class CustomMetrics {
 public:
  /// `columns`: the library's own, which no metric may have.
  explicit CustomMetrics(at::Device device, std::vector<std::string> columns = {})
      : device_(device), reserved_(std::move(columns)) {}

  /// The host does not wait. Throws SettingsError for a name or weight that cannot be used.
  void add(const std::string& name, const MetricValue& value, const LogOptions& options);
  /// Reads the logged numbers of finished steps, whose memory later steps reuse. The host does not
  /// wait. Call it after each step; add() does it too.
  void poll();
  /// This rank's numbers since the last call, in the order of the names' first use. The host waits
  /// for the device.
  std::vector<CustomNumber> take();

 private:
  struct Entry {
    CustomNumber total;        // without the tensors' values
    at::Tensor on_device;      // of the tensors, float64; undefined before the first
    bool has_tensors = false;  // since take()
    std::deque<std::pair<LoggedScalar, double>> logged;  // not read yet, with their weights
  };

  Entry& find(const std::string& name, MetricReduction reduction);
  /// Throws SettingsError for a name that is empty or whose column exists.
  void check_new(const CustomNumber& number) const;
  void add_tensor(Entry& entry, const at::Tensor& value, double weight) const;
  /// Without `all`, reads only available numbers: the host does not wait.
  static void read_logged(Entry& entry, bool all);

  at::Device device_;
  std::vector<std::string> reserved_;
  std::vector<Entry> entries_;
};

}  // namespace ddp::detail
