// SPDX-License-Identifier: Apache-2.0
#include "optim/flat/averages.hpp"

#include "optim/capture.hpp"
#include "optim/flat/layout.hpp"
#include "optim/flat/passes.hpp"
#include "optim/parameter_state.hpp"

namespace ddp::detail {
namespace {

bool is_same(const std::vector<FlatAverage>& a, const std::vector<FlatAverage>& b) {
  bool same = a.size() == b.size();
  for (size_t i = 0; same && i < a.size(); ++i) {
    same = a[i].average == b[i].average && a[i].weight == b[i].weight && a[i].numel == b[i].numel &&
           a[i].dtype == b[i].dtype;
  }
  return same;
}

}  // namespace

bool FlatAverages::takes(const at::Tensor& average, const at::Tensor& weight, at::Device device) {
  return device.is_cuda() && average.device() == device && weight.device() == device &&
         average.scalar_type() == at::kFloat && is_flat_dtype(weight.scalar_type()) &&
         weight.is_non_overlapping_and_dense() && same_memory_layout(average, weight);
}

void FlatAverages::update(const std::vector<at::Tensor>& averages,
                          const std::vector<at::Tensor>& weights, double share) {
  std::vector<FlatAverage> entries;
  for (size_t i = 0; i < averages.size(); ++i) {
    const auto dtype = weights[i].scalar_type();
    entries.push_back({.average = averages[i].data_ptr<float>(),
                       .weight = weights[i].data_ptr(),
                       .numel = averages[i].numel(),
                       .dtype = flat_dtype(dtype),
                       .aligned = is_aligned(averages[i].data_ptr(), at::kFloat) &&
                                  is_aligned(weights[i].data_ptr(), dtype)});
  }
  if (entries.empty()) {
    return;
  }
  const at::Device device = averages.front().device();
  if (!is_same(entries, entries_)) {
    refuse_to_make_while_capturing("the table of averages");
    std::vector<FlatChunk> chunks;
    for (size_t i = 0; i < entries.size(); ++i) {
      append_chunks(chunks, i, entries[i].numel);
    }
    table_ = to_device(entries, device);
    chunks_ = to_device(chunks, device);
    entries_ = std::move(entries);
  }
  const auto num_chunks = chunks_.numel() / static_cast<int64_t>(sizeof(FlatChunk));
  if (num_chunks == 0) {
    return;  // tensors without elements
  }
  flat_average(static_cast<const FlatAverage*>(table_.data_ptr()),
               static_cast<const FlatChunk*>(chunks_.data_ptr()), static_cast<int>(num_chunks),
               static_cast<float>(share), device);
}

}  // namespace ddp::detail
