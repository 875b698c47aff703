// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/custom_metrics.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "ddp/core/error.hpp"

namespace ddp::detail {

void check_one_element(const std::string& name, const at::Tensor& value) {
  if (value.numel() != 1) {
    throw SettingsError(
        concat("metric \"", name, "\" has ", value.numel(), " elements: it must have one"));
  }
}

void CustomMetrics::add(const std::string& name, const MetricValue& value,
                        const LogOptions& options) {
  if (!(options.weight >= 0) || std::isinf(options.weight)) {
    throw SettingsError(concat("the weight of metric \"", name, "\" is ", options.weight,
                               ": it must be at least 0 and finite"));
  }
  poll();
  Entry& entry = find(name, options.reduction);
  entry.total.is_logged = true;
  if (options.weight == 0) {
    return;
  }
  if (value.tensor.defined()) {
    add_tensor(entry, value.tensor, options.weight);
  } else if (value.logged.has_value()) {
    entry.logged.emplace_back(value.logged, options.weight);
  } else if (value.number) {
    entry.total.add(*value.number, options.weight);
  }
}

CustomMetrics::Entry& CustomMetrics::find(const std::string& name, MetricReduction reduction) {
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& entry) { return entry.total.name == name; });
  if (found == entries_.end()) {
    const CustomNumber number{.name = name, .reduction = reduction};
    check_new(number);
    Entry& entry = entries_.emplace_back();
    entry.total = number;
    entry.total.clear();
    return entry;
  }
  if (found->total.reduction != reduction) {
    throw SettingsError(concat("metric \"", name, "\" was logged with another reduction before"));
  }
  return *found;
}

void CustomMetrics::check_new(const CustomNumber& number) const {
  if (number.name.empty()) {
    throw SettingsError("a metric has an empty name");
  }
  const auto column = number.column();
  if (std::find(reserved_.begin(), reserved_.end(), column) != reserved_.end()) {
    std::string names;
    for (const auto& name : reserved_) {
      names += (names.empty() ? "" : ", ") + name;
    }
    throw SettingsError(concat("metric \"", number.name, "\" would have libddp's column ", column,
                               "; fix: choose another name than ", names));
  }
  for (const Entry& entry : entries_) {
    if (entry.total.column() == column) {
      throw SettingsError(concat("metrics \"", entry.total.name, "\" and \"", number.name,
                                 "\" would have one column ", column,
                                 "; fix: choose another name"));
    }
  }
}

void CustomMetrics::add_tensor(Entry& entry, const at::Tensor& value, double weight) const {
  CustomNumber& total = entry.total;
  check_one_element(total.name, value);
  if (value.is_cpu() && !device_.is_cpu()) {  // a copy to the device would make the host wait
    return total.add(value.item<double>(), weight);
  }
  const at::NoGradGuard no_grad;
  const auto number = value.detach().reshape({}).to(device_);
  auto& sum = entry.on_device;
  if (!sum.defined()) {
    sum = at::empty({}, number.options().dtype(at::kDouble));
  }
  if (!std::exchange(entry.has_tensors, true)) {
    CustomNumber start{.name = total.name, .reduction = total.reduction};
    start.clear();
    sum.fill_(start.value);
  }
  switch (total.reduction) {  // one kernel each, which converts the number too
    case MetricReduction::Mean:
      sum.add_(number, weight);
      break;
    case MetricReduction::Min:
      at::minimum_out(sum, sum, number);
      break;
    case MetricReduction::Max:
      at::maximum_out(sum, sum, number);
      break;
    default:
      sum.add_(number);
  }
  total.weight += weight;
  ++total.count;
}

void CustomMetrics::read_logged(Entry& entry, bool all) {
  while (!entry.logged.empty() && (all || entry.logged.front().first.is_ready())) {
    const auto& [scalar, weight] = entry.logged.front();
    entry.total.add(scalar.value(), weight);
    entry.logged.pop_front();
  }
}

void CustomMetrics::poll() {
  for (Entry& entry : entries_) {
    read_logged(entry, /*all=*/false);
  }
}

std::vector<CustomNumber> CustomMetrics::take() {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> on_device;
  for (Entry& entry : entries_) {
    read_logged(entry, /*all=*/true);
    if (entry.has_tensors) {
      on_device.push_back(entry.on_device);
    }
  }
  const auto host = on_device.empty() ? at::Tensor() : at::stack(on_device).cpu();
  std::vector<CustomNumber> numbers;
  int64_t next = 0;
  for (Entry& entry : entries_) {
    if (std::exchange(entry.has_tensors, false)) {
      entry.total.combine(host.const_data_ptr<double>()[next++]);
    }
    numbers.push_back(entry.total);
    entry.total.clear();
  }
  return numbers;
}

}  // namespace ddp::detail
