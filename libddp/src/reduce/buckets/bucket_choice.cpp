// SPDX-License-Identifier: Apache-2.0
#include "reduce/buckets/bucket_choice.hpp"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/control/wire/bounded_json.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/check.hpp"

namespace ddp::detail {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();

// Bytes, ready time and reduction cost of consecutive gradients [begin, end).
class Runs {
 public:
  Runs(const std::vector<ReadyGradient>& gradients,
       const std::function<double(int64_t, bool)>& reduction_us)
      : reduction_us_(reduction_us), bytes_(gradients.size() + 1), ready_(gradients.size() + 1) {
    for (size_t i = 0; i < gradients.size(); ++i) {
      bytes_[i + 1] = bytes_[i] + gradients[i].num_bytes;
      // Measured times may be slightly out of order, but a later gradient is never ready earlier.
      ready_[i + 1] = std::max(ready_[i], gradients[i].ready_us);
    }
  }
  size_t count() const { return bytes_.size() - 1; }
  double ready(size_t end) const { return ready_[end]; }
  double cost(size_t begin, size_t end) const {
    return reduction_us_(bytes_[end] - bytes_[begin], end == count());
  }

 private:
  const std::function<double(int64_t, bool)>& reduction_us_;
  std::vector<int64_t> bytes_;
  std::vector<double> ready_;
};

// Returns the earliest end of reducing all gradients. ends[j] is the end of the first j.
double earliest_end(const Runs& runs) {
  std::vector<double> ends(runs.count() + 1, 0.0);
  for (size_t j = 1; j <= runs.count(); ++j) {
    ends[j] = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < j; ++i) {
      ends[j] = std::min(ends[j], std::max(ends[i], runs.ready(j)) + runs.cost(i, j));
    }
  }
  return ends.back();
}

// Returns the fewest buckets that end by `deadline`, found from the back. latest[i] is the deadline
// of gradients [0, i) if k more buckets follow. next[k][i] is where the next bucket after i ends.
std::vector<int> fewest_cuts(const Runs& runs, double deadline) {
  const size_t n = runs.count();
  std::vector<double> latest(n + 1, kNever);
  latest[n] = deadline;
  std::vector<std::vector<size_t>> next;
  while (latest[0] < 0) {
    DDP_CHECK(next.size() < n, "no cuts end by ", deadline, " us");
    std::vector<double> before(n + 1, kNever);
    next.emplace_back(n + 1, 0);
    for (size_t i = 0; i < n; ++i) {
      for (size_t j = i + 1; j <= n; ++j) {
        if (latest[j] == kNever) {
          continue;
        }
        const double start = latest[j] - runs.cost(i, j);
        if (start >= runs.ready(j) && start > before[i]) {
          before[i] = start;
          next.back()[i] = j;
        }
      }
    }
    latest = std::move(before);
  }
  std::vector<int> cuts;
  for (size_t i = 0, k = next.size(); k-- > 0;) {
    i = next[k][i];
    cuts.push_back(static_cast<int>(i));
  }
  return cuts;
}

int64_t total(const std::vector<int64_t>& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

[[noreturn]] void fail(const std::string& why) {
  throw ReadError(concat("the plan's buckets are damaged: ", why,
                         "; fix: remove the plan, and they are chosen again"));
}

int64_t whole_number(const nlohmann::json& json) {
  if (!fits_int64(json)) {
    fail("a whole number is expected");
  }
  return json.get<int64_t>();
}

}  // namespace

BucketChoice choose_buckets(const std::vector<ReadyGradient>& gradients,
                            const std::function<double(int64_t, bool)>& reduction_us,
                            double tolerance_us) {
  if (gradients.empty()) {
    return {};
  }
  const Runs runs(gradients, reduction_us);
  const double end = earliest_end(runs);
  BucketChoice choice;
  constexpr double kRounding = 1e-9;  // fewest_cuts subtracts what earliest_end adds
  choice.cuts = fewest_cuts(runs, end * (1 + kRounding) + tolerance_us + kRounding);
  choice.exposed_us = exposed_us(gradients, choice.cuts, reduction_us);
  return choice;
}

double exposed_us(const std::vector<ReadyGradient>& gradients, const std::vector<int>& cuts,
                  const std::function<double(int64_t, bool)>& reduction_us) {
  const Runs runs(gradients, reduction_us);
  double end = 0;
  size_t begin = 0;
  for (const int cut : cuts) {
    const auto next = static_cast<size_t>(cut);
    end = std::max(end, runs.ready(next)) + runs.cost(begin, next);
    begin = next;
  }
  DDP_CHECK(begin == runs.count(), "the cuts end at ", begin, " of ", runs.count());
  return end - runs.ready(runs.count());
}

std::string BucketChoice::to_json(const std::vector<int64_t>& gradient_bytes) const {
  return nlohmann::json{{"cuts", cuts},
                        {"exposed_us", exposed_us},
                        {"gradients", gradient_bytes.size()},
                        {"bytes", total(gradient_bytes)}}
      .dump();
}

std::optional<BucketChoice> BucketChoice::from_json(const std::string& json,
                                                    const std::vector<int64_t>& gradient_bytes) {
  try {
    const auto parsed = nlohmann::json::parse(json);
    const auto num_gradients = static_cast<int64_t>(gradient_bytes.size());
    if (whole_number(parsed.at("gradients")) != num_gradients ||
        whole_number(parsed.at("bytes")) != total(gradient_bytes)) {
      return std::nullopt;
    }
    BucketChoice choice{.cuts = {}, .exposed_us = parsed.at("exposed_us").get<double>()};
    int64_t before = 0;
    for (const auto& entry : parsed.at("cuts").get_ref<const nlohmann::json::array_t&>()) {
      const int64_t cut = whole_number(entry);
      if (cut <= before) {
        fail("cuts must ascend");
      }
      if (cut > num_gradients) {
        fail(concat("they end at ", cut));
      }
      choice.cuts.push_back(static_cast<int>(cut));
      before = cut;
    }
    if (before != num_gradients) {
      fail(concat("they end at ", before));
    }
    return choice;
  } catch (const nlohmann::json::exception& error) {
    fail(error.what());
  }
}

}  // namespace ddp::detail
