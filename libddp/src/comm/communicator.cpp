// SPDX-License-Identifier: Apache-2.0
#include "ddp/comm/communicator.hpp"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "comm/algorithm_choices.hpp"
#include "comm/launch_sequencer.hpp"
#include "comm/string_collectives.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp {
namespace {

constexpr const char* kTableName = "all_reduce";
constexpr int kTimedRuns = 3;

// Returns the times of the slowest rank, for which all ranks wait.
std::vector<AllReduceRow> slowest(Communicator& communicator,
                                  const std::vector<AllReduceRow>& rows) {
  std::vector<double> times;
  for (const auto& row : rows) {
    times.insert(times.end(), {row.ring_us, row.symmetric_us});
  }
  auto tensor = at::tensor(times, at::kDouble).to(communicator.device());
  communicator.all_reduce(tensor, ReduceOp::Max)->wait();
  tensor = tensor.cpu();
  auto result = rows;
  for (size_t i = 0; i < result.size(); ++i) {
    result[i].ring_us = tensor.const_data_ptr<double>()[2 * i];
    result[i].symmetric_us = tensor.const_data_ptr<double>()[2 * i + 1];
  }
  return result;
}

}  // namespace

const char* to_string(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
      return "sum";
    case ReduceOp::Avg:
      return "avg";
    case ReduceOp::Min:
      return "min";
    case ReduceOp::Max:
      return "max";
    case ReduceOp::Product:
      return "product";
  }
  return "unknown";
}

Communicator::Communicator(const Communicator* parent)
    : launch_sequencer_(parent == nullptr ? std::make_shared<LaunchSequencer>()
                                          : parent->launch_sequencer_) {}

LaunchSequencer& Communicator::launch_sequencer() {
  return *launch_sequencer_;
}

Plan& Communicator::plan() {
  if (plan_ == nullptr) {
    auto identity = plan_identity();
    identity["backend"] = backend();
    identity["world_size"] = std::to_string(world_size());
    plan_ = std::make_unique<Plan>(std::move(identity));
  }
  return *plan_;
}

// Either all ranks adopt the plan or none: a rank that measured alone would deadlock. So every rank
// first reads the plan and shares its result, because GPUs and libraries may differ.
void Communicator::adopt_plan(const std::string& json, const std::string& origin) {
  const auto agreed = world_size() == 1 ? json : detail::broadcast_string(*this, json, 0);
  Plan adopted = plan();
  const auto difference = adopted.adopt(agreed, origin);
  auto table = table_;
  ops::detail::MeasuredChoices kernels;
  std::string damage;  // used only if the plan fits
  try {
    if (const auto text = adopted.find(kTableName)) {
      table = AllReduceTable::from_json(*text);
    }
    if (const auto text = adopted.find(detail::kAlgorithmChoices)) {
      kernels = detail::algorithm_choices_from_json(*text);
    }
  } catch (const ReadError& error) {
    damage = error.what();
  }
  const auto of_all = [&](const std::string& text) {
    return world_size() == 1 ? std::vector{text} : detail::all_gather_string(*this, text);
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
    if (rank() == 0) {
      log_warning(concat("the measured choices of ", origin, " are of another system (rank ",
                         refused - verdicts.begin(), ": ", *refused, "); they are measured again"));
    }
    return;
  }
  plan() = std::move(adopted);
  table_ = std::move(table);
  ops::detail::ChoiceBook::instance().adopt(kernels);
}

const AllReduceTable& Communicator::all_reduce_table() {
  if (world_size() == 1) {
    return table_;
  }
  // Rank 0 decides, because a rank without a table must not measure alone.
  const auto known = detail::broadcast_string(*this, plan().find(kTableName).value_or(""), 0);
  if (known.empty()) {
    table_ = AllReduceTable(slowest(*this, measure_all_reduce()));
    plan().set(kTableName, table_.to_json());
  } else {
    table_ = AllReduceTable::from_json(known);
  }
  return table_;
}

// The host waits for each run. Backends with streams and graphs override this.
std::vector<AllReduceRow> Communicator::measure_all_reduce() {
  std::vector<AllReduceRow> rows;
  for (const int64_t num_bytes :
       {int64_t{4} << 10, int64_t{64} << 10, int64_t{1} << 20, int64_t{8} << 20}) {
    auto buffer = at::zeros({num_bytes / 4}, at::device(device()).dtype(at::kFloat));
    double best_us = 0;
    for (int run = -1; run < kTimedRuns; ++run) {  // the first one warms up
      barrier();
      const auto begin = std::chrono::steady_clock::now();
      all_reduce(buffer)->wait_host();
      const auto us =
          std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
              .count();
      best_us = run <= 0 ? us : std::min(best_us, us);
    }
    rows.push_back({.num_bytes = num_bytes, .ring_us = best_us});
  }
  return rows;
}

}  // namespace ddp
