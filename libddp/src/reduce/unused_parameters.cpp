// SPDX-License-Identifier: Apache-2.0
#include "reduce/unused_parameters.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "comm/collective_label.hpp"

namespace ddp::detail {

UnusedParameters::UnusedParameters(CommunicatorPtr communicator, const DdpOptions& options,
                                   size_t num_parameters)
    : communicator_(std::move(communicator)),
      finds_unused_(options.find_unused_parameters),
      is_static_(options.static_graph),
      map_(at::zeros({static_cast<int64_t>(num_parameters)},
                     at::TensorOptions().dtype(at::kInt).device(communicator_->device()))) {
  used_.assign(num_parameters, false);
}

void UnusedParameters::forget_used() {
  used_.assign(used_.size(), false);
}

// With static_graph the ranks exchange the used parameters only in the first backward.
bool UnusedParameters::reads_map() const {
  return is_static_ ? history_.used_by_any.empty() : finds_unused_;
}

void UnusedParameters::start_map() {
  if (!reads_map()) {
    return;
  }
  map_.copy_(at::tensor(std::vector<int>(used_.begin(), used_.end()), at::kInt));
  static const auto label = make_label("used parameters");
  const LabelScope scope(label);
  work_ = communicator_->all_reduce(map_, ReduceOp::Sum);
}

std::vector<bool> UnusedParameters::finish_map() {
  if (!reads_map() || work_ == nullptr) {  // a rehearsal starts no map
    return is_static_ ? history_.used_by_any : used_;
  }
  work_->wait();
  work_ = nullptr;
  auto used = used_;
  if (std::find(used.begin(), used.end(), false) != used.end()) {  // the only read of the device
    const auto counts = map_.cpu();
    for (size_t i = 0; i < used.size(); ++i) {
      used[i] = counts.data_ptr<int>()[i] > 0;
    }
  }
  if (is_static_) {
    history_.used_by_any = used;
  }
  return used;
}

void UnusedParameters::end_pass(bool is_first) {
  auto unused = used_;
  unused.flip();
  history_.set_changed = history_.set_changed || (!is_first && unused != history_.previous_unused);
  history_.previous_unused = std::move(unused);
  forget_used();
}

int64_t UnusedParameters::num_unused() const {
  return std::count(history_.previous_unused.begin(), history_.previous_unused.end(), true);
}

}  // namespace ddp::detail
