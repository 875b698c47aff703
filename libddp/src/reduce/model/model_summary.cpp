// SPDX-License-Identifier: Apache-2.0
#include "ddp/reduce/model_summary.hpp"

#include <algorithm>
#include <cstdio>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/detail/text.hpp"

namespace ddp {
namespace {

// "25,557,032", whatever the locale.
std::string grouped(int64_t number) {
  const auto digits = std::to_string(number);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) {
      text += ',';
    }
    text += digits[i];
  }
  return text;
}

struct ModuleRow {
  std::string name;
  std::string parameters = {};  // "weight [64, 3, 7, 7], bias [64]"
  std::string dtype = {};
  int64_t elements = 0;
  int64_t trained = 0;
};

ModuleRow& row_of(std::vector<ModuleRow>& rows, const std::string& module) {
  const auto found = std::find_if(rows.begin(), rows.end(),
                                  [&](const ModuleRow& row) { return row.name == module; });
  return found == rows.end() ? rows.emplace_back(ModuleRow{module}) : *found;
}

void add(ModuleRow& row, const std::string& name, const at::Tensor& tensor) {
  const auto dtype = concat(tensor.scalar_type());
  row.parameters += concat(row.parameters.empty() ? "" : ", ", name, " ", tensor.sizes());
  row.dtype = row.dtype.empty() || row.dtype == dtype ? dtype : "mixed";
  row.elements += tensor.numel();
  row.trained += tensor.requires_grad() ? tensor.numel() : 0;
}

std::vector<ModuleRow> rows_of(const NamedParameters& parameters) {
  std::vector<ModuleRow> rows;
  for (const auto& [name, tensor] : parameters) {
    const auto dot = name.rfind('.');
    const bool is_own = dot == std::string::npos;
    add(row_of(rows, is_own ? "(model)" : name.substr(0, dot)),
        is_own ? name : name.substr(dot + 1), tensor);
  }
  return rows;
}

std::string padded(const std::string& text, size_t width) {
  return text + std::string(width - std::min(width, text.size()), ' ');
}

std::string mib(double bytes) {
  const detail::ClassicNumbers numbers;
  char text[40];
  std::snprintf(text, sizeof text, "%.1f MiB of memory", bytes / (1 << 20));
  return text;
}

}  // namespace

std::string model_summary(const DataParallelModel& model) {
  const auto rows = rows_of(model.named_parameters());
  size_t names = 0, parameters = 0;
  ModuleRow total{""};
  for (const ModuleRow& row : rows) {
    names = std::max(names, row.name.size());
    parameters = std::max(parameters, row.parameters.size());
    total.elements += row.elements;
    total.trained += row.trained;
  }
  std::string text;
  for (const ModuleRow& row : rows) {
    const auto count = grouped(row.elements);
    const char* frozen = row.trained == row.elements ? ""
                         : row.trained == 0          ? "  frozen"
                                                     : "  partly frozen";
    text += concat(padded(row.name, names), "  ", padded(row.parameters, parameters), "  ",
                   padded(row.dtype, 8), std::string(14 - std::min<size_t>(14, count.size()), ' '),
                   count, frozen, "\n");
  }
  double bytes = 0;
  int64_t in_buffers = 0;
  for (const auto& entry : model.named_parameters()) {
    bytes += static_cast<double>(entry.tensor.nbytes());
  }
  for (const auto& entry : model.named_buffers()) {
    bytes += static_cast<double>(entry.tensor.nbytes());
    in_buffers += entry.tensor.numel();
  }
  return text + concat(grouped(total.elements), " parameters, ", grouped(total.trained),
                       " of them trained; ", grouped(in_buffers), " elements of buffers; ",
                       mib(bytes), "\n");
}

}  // namespace ddp
