// SPDX-License-Identifier: Apache-2.0
#include "comm/tuning/group_choices.hpp"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>

#include "comm/string_collectives.hpp"
#include "comm/tuning/algorithm_choices.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {
namespace {

constexpr int kTimedRuns = 3;
constexpr const char* kTableName = "all_reduce";

// Returns the times of the slowest rank, for which all ranks wait.
std::vector<AllReduceRow> slowest(Communicator& communicator,
                                  const std::vector<AllReduceRow>& rows) {
  std::vector<double> times;
  for (const auto& row : rows) {
    times.push_back(row.us);
  }
  auto tensor = at::tensor(times, at::kDouble).to(communicator.device());
  communicator.all_reduce(tensor, ReduceOp::Max)->wait();
  tensor = tensor.cpu();
  auto result = rows;
  for (size_t i = 0; i < result.size(); ++i) {
    result[i].us = tensor.const_data_ptr<double>()[i];
  }
  return result;
}

// The host waits for each run.
std::vector<AllReduceRow> time_on_host(Communicator& group) {
  std::vector<AllReduceRow> rows;
  for (const int64_t num_bytes :
       {int64_t{4} << 10, int64_t{64} << 10, int64_t{1} << 20, int64_t{8} << 20}) {
    auto buffer = at::zeros({num_bytes / 4}, at::device(group.device()).dtype(at::kFloat));
    double best_us = 0;
    for (int run = -1; run < kTimedRuns; ++run) {  // the first one warms up
      group.barrier();
      const auto begin = std::chrono::steady_clock::now();
      group.all_reduce(buffer)->wait_host();
      const auto us =
          std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
              .count();
      best_us = run <= 0 ? us : std::min(best_us, us);
    }
    rows.push_back({.num_bytes = num_bytes, .us = best_us});
  }
  return rows;
}

}  // namespace

Plan& GroupChoices::plan() {
  if (!plan_) {
    const auto* backend = group_.measurements();
    auto identity = backend == nullptr ? Plan::Identity() : backend->plan_identity();
    identity["backend"] = group_.backend();
    identity["world_size"] = std::to_string(group_.world_size());
    plan_.emplace(std::move(identity));
  }
  return *plan_;
}

// Either all ranks adopt the plan or none: a rank that measured alone would deadlock. So every rank
// first reads the plan and shares its result, because GPUs and libraries may differ.
void GroupChoices::adopt(const std::string& json, const std::string& origin) {
  const auto agreed = group_.world_size() == 1 ? json : broadcast_string(group_, json, 0);
  Plan adopted = plan();
  const auto difference = adopted.adopt(agreed, origin);
  auto table = table_;
  ops::detail::MeasuredChoices kernels;
  std::string damage;  // used only if the plan fits
  try {
    if (const auto text = adopted.find(kTableName)) {
      table = AllReduceTable::from_json(*text);
    }
    if (const auto text = adopted.find(kAlgorithmChoices)) {
      kernels = algorithm_choices_from_json(*text);
    }
  } catch (const ReadError& error) {
    damage = error.what();
  }
  const auto of_all = [&](const std::string& text) {
    return group_.world_size() == 1 ? std::vector{text} : all_gather_string(group_, text);
  };
  const auto is_text = [](const auto& text) { return !text.empty(); };
  const auto damages = of_all(damage);
  if (const auto found = std::find_if(damages.begin(), damages.end(), is_text);
      found != damages.end()) {
    throw ReadError(concat(origin, ": ", *found));
  }
  const auto verdicts = of_all(difference);
  const auto refused = std::find_if(verdicts.begin(), verdicts.end(), is_text);
  if (refused != verdicts.end()) {
    if (group_.rank() == 0) {
      log_warning(concat("the measured choices of ", origin, " are of another system (rank ",
                         refused - verdicts.begin(), ": ", *refused, "); they are measured again"));
    }
    return;
  }
  plan() = std::move(adopted);
  table_ = std::move(table);
  ops::detail::ChoiceBook::instance().adopt(kernels);
}

const AllReduceTable& GroupChoices::all_reduce_table() {
  if (group_.world_size() == 1) {
    return table_;
  }
  // Rank 0 decides, because a rank without a table must not measure alone.
  const auto known = broadcast_string(group_, plan().find(kTableName).value_or(""), 0);
  if (known.empty()) {
    auto* const backend = group_.measurements();
    auto rows = backend == nullptr ? std::vector<AllReduceRow>() : backend->measure_all_reduce();
    if (rows.empty()) {
      rows = time_on_host(group_);
    }
    table_ = AllReduceTable(slowest(group_, rows));
    plan().set(kTableName, table_.to_json());
  } else {
    table_ = AllReduceTable::from_json(known);
  }
  return table_;
}

}  // namespace ddp::detail
