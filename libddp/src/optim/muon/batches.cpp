// SPDX-License-Identifier: Apache-2.0
#include "optim/muon/batches.hpp"

#include <ATen/Functions.h>
#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ddp/core/error.hpp"
#include "ddp/detail/check.hpp"

namespace ddp::detail {
namespace {

// Elements of a batch. Matrix products of small matrices need company to fill a GPU, and many
// batches are easier to divide evenly. 768 x 768 matrices are batched by three.
constexpr int64_t kBatchElements = 1 << 21;
constexpr size_t kMaxNames = 16;  // of the line in the log

bool matches_any(const std::string& name, const std::vector<std::string>& patterns) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
    return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
  });
}

bool is_matrix(const ParameterSettings& settings) {
  return settings.parameter.tensor.dim() >= 2;
}

// A head that shares the weight of an embedding may have any name, and may be registered first.
bool is_left_to_adamw(const ParameterSettings& settings, const MuonOptions& options) {
  return matches_any(settings.parameter.name, options.adamw_parameters) ||
         std::any_of(settings.other_names.begin(), settings.other_names.end(),
                     [&](const auto& name) { return matches_any(name, options.adamw_parameters); });
}

// The default list is for many models. In another one such a pattern is a mistake.
void refuse_unused_patterns(const std::vector<ParameterSettings>& parameters,
                            const MuonOptions& options) {
  if (options.adamw_parameters == MuonOptions().adamw_parameters) {
    return;
  }
  for (const std::string& pattern : options.adamw_parameters) {
    const MuonOptions alone{.adamw_parameters = {pattern}};
    if (std::none_of(parameters.begin(), parameters.end(), [&](const ParameterSettings& settings) {
          return is_left_to_adamw(settings, alone);
        })) {
      throw SettingsError(concat("optimizer.muon.adamw_parameters: \"", pattern,
                                 "\" matches no parameter; fix: correct or remove the pattern"));
    }
  }
}

double lr_factor_of(int64_t rows, int64_t cols, MuonScale scale) {
  if (rows == 0 || cols == 0) {
    return 1.0;
  }
  const auto r = static_cast<double>(rows);
  const auto c = static_cast<double>(cols);
  return scale == MuonScale::Original ? std::sqrt(std::max(1.0, r / c))
                                      : 0.2 * std::sqrt(std::max(r, c));
}

bool share_batch(const MuonBatch& a, const MuonBatch& b) {
  return a.rows == b.rows && a.cols == b.cols && a.lr_scale == b.lr_scale &&
         a.weight_decay == b.weight_decay && a.factor == b.factor && a.device == b.device &&
         a.leaf_dtype == b.leaf_dtype;
}

bool is_full(const MuonBatch& batch) {
  const int64_t numel = std::max<int64_t>(1, batch.rows * batch.cols);
  return (std::ssize(batch.members) + 1) * numel > kBatchElements;
}

// Of the products: proportional to their operations.
double cost_of(const MuonBatch& batch) {
  const auto rows = static_cast<double>(batch.rows);
  return static_cast<double>(batch.members.size()) * rows * rows * static_cast<double>(batch.cols);
}

// A batch of this one matrix.
MuonBatch batch_of(const ParameterSettings& settings, const MuonOptions& options) {
  const at::Tensor& leaf = settings.parameter.tensor;
  const int64_t rows = rows_of(leaf);
  const int64_t cols = cols_of(leaf);
  const bool half = is_half(leaf.scalar_type());
  MuonBatch batch{.rows = std::min(rows, cols),
                  .cols = std::max(rows, cols),
                  .lr_scale = settings.lr_scale,
                  .weight_decay = settings.weight_decay,
                  .factor = lr_factor_of(rows, cols, options.scale),
                  .device = leaf.device(),
                  .leaf_dtype = leaf.scalar_type(),
                  .dtype = half ? at::kFloat : leaf.scalar_type()};
  ParameterState& member = batch.members.emplace_back();
  member.name = settings.parameter.name;
  member.leaf = leaf;
  member.memory = memory_of(leaf);
  member.needs_master = half;
  return batch;
}

}  // namespace

MuonSplit split_for_muon(const std::vector<ParameterSettings>& parameters,
                         const OptimizerOptions& options) {
  refuse_unused_patterns(parameters, options.muon);
  MuonSplit split;
  for (const ParameterSettings& settings : parameters) {
    const bool muon = is_matrix(settings) && !is_left_to_adamw(settings, options.muon);
    (muon ? split.matrices : split.rest).push_back(settings);
  }
  if (split.matrices.empty()) {
    throw SettingsError(concat(
        "optimizer.type=muon has no matrix to update: of ", parameters.size(),
        " parameters none has two or more dimensions and a name outside ",
        "optimizer.muon.adamw_parameters; fix: shorten that list, or set optimizer.type=adamw"));
  }
  return split;
}

std::string describe(const MuonSplit& split) {
  std::vector<std::string> names;
  for (const ParameterSettings& settings : split.rest) {
    if (is_matrix(settings)) {
      names.push_back(settings.parameter.name);
    }
  }
  const size_t num_matrices = split.matrices.size();
  std::string text = concat("optimizer.type=muon: Muon updates ", num_matrices,
                            num_matrices == 1 ? " matrix" : " matrices", ", AdamW the other ",
                            split.rest.size(), " parameters");
  for (size_t i = 0; i < std::min(names.size(), kMaxNames); ++i) {
    text += concat(i == 0 ? ", with these matrices: " : ", ", names[i]);
  }
  if (names.size() > kMaxNames) {
    text += concat(" and ", names.size() - kMaxNames, " more");
  }
  return text;
}

int64_t rows_of(const at::Tensor& parameter) {
  return parameter.size(0);
}

int64_t cols_of(const at::Tensor& parameter) {
  const at::IntArrayRef sizes = parameter.sizes();
  return std::accumulate(sizes.begin() + 1, sizes.end(), int64_t{1}, std::multiplies<>());
}

at::Tensor MuonBatch::view(const at::Tensor& batch, size_t i) const {
  const at::IntArrayRef sizes = members[i].memory.layout.sizes();
  const at::Tensor matrix = batch.select(0, static_cast<int64_t>(i));
  // Square matrices are not transposed, nor are empty ones, whose view would need a copy.
  return sizes[0] > rows && matrix.numel() > 0 ? matrix.t().view(sizes) : matrix.view(sizes);
}

at::Tensor MuonBatch::empty() const {
  return at::empty({std::ssize(members), rows, cols},
                   at::TensorOptions().dtype(dtype).device(device));
}

std::vector<MuonBatch> make_batches(const std::vector<ParameterSettings>& matrices,
                                    const MuonOptions& options) {
  std::vector<MuonBatch> batches;
  for (const ParameterSettings& settings : matrices) {
    MuonBatch next = batch_of(settings, options);
    const auto home = std::find_if(batches.begin(), batches.end(), [&](const MuonBatch& batch) {
      return share_batch(batch, next) && !is_full(batch);
    });
    if (home == batches.end()) {
      batches.push_back(std::move(next));
    } else {
      home->members.push_back(std::move(next.members.front()));
    }
  }
  return batches;
}

void assign_owners(std::vector<MuonBatch>& batches, int world_size) {
  DDP_CHECK(world_size > 0);
  std::vector<size_t> order(batches.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return cost_of(batches[a]) > cost_of(batches[b]); });
  std::vector<double> load(static_cast<size_t>(world_size));
  for (const size_t i : order) {
    const auto least = std::min_element(load.begin(), load.end());
    batches[i].owner = static_cast<int>(least - load.begin());
    *least += cost_of(batches[i]);
  }
}

}  // namespace ddp::detail
