// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/ranks/stragglers.hpp"

#include <algorithm>
#include <cmath>

#include "ddp/core/error.hpp"
#include "ddp/detail/text_stream.hpp"

namespace ddp::detail {
namespace {

constexpr double kSlowFactor = 1.5, kSlowShare = 0.1;
constexpr double kThrottledFactor = 1.1, kThrottledShare = 0.05, kThrottledClock = 0.9;
constexpr int kStreak = 3;
constexpr double kLeastExcessMs = 50;

struct Comparison {
  double own = NAN;
  double others = NAN;  ///< their median

  bool is_known() const { return !std::isnan(own) && !std::isnan(others); }
};

/// A number of all ranks. NaN is unknown, and is in no median.
class NumberOfRanks {
 public:
  template <typename Number>
  NumberOfRanks(const std::vector<RankNumbers>& ranks, const Number& number) {
    for (const auto& rank : ranks) {
      numbers_.push_back(number(rank));
      if (!std::isnan(numbers_.back())) {
        sorted_.push_back(numbers_.back());
      }
    }
    std::sort(sorted_.begin(), sorted_.end());
  }

  Comparison of(std::size_t rank) const {
    const double own = numbers_[rank];
    const bool is_known = !std::isnan(own);
    const std::size_t num_others = sorted_.size() - (is_known ? 1 : 0);
    if (num_others == 0) {
      return {.own = own};
    }
    const auto place = static_cast<std::size_t>(
        std::lower_bound(sorted_.begin(), sorted_.end(), own) - sorted_.begin());
    const auto other = [&](std::size_t i) { return sorted_[is_known && i >= place ? i + 1 : i]; };
    return {.own = own, .others = (other((num_others - 1) / 2) + other(num_others / 2)) / 2};
  }

 private:
  std::vector<double> numbers_;
  std::vector<double> sorted_;
};

/// What is compared in one logging step.
struct Numbers {
  explicit Numbers(const std::vector<RankNumbers>& ranks)
      : step_ms(mean_step_ms(ranks)),
        busy(ranks,
             [this](const RankNumbers& rank) {
               const double ms = step_ms > 0 ? step_ms - rank.exposed_comm_ms : NAN;
               return ms < 0 ? 0 : ms;  // NaN stays
             }),
        loader_wait(ranks, [](const RankNumbers& rank) { return rank.loader_wait_ms; }),
        clock(ranks, [](const RankNumbers& rank) { return gpu_of(rank).sm_clock_mhz; }),
        utilisation(ranks,
                    [](const RankNumbers& rank) { return gpu_of(rank).utilisation_percent; }) {}

  /// A step ends on all ranks together.
  static double mean_step_ms(const std::vector<RankNumbers>& ranks) {
    double longest = 0;
    for (const auto& rank : ranks) {
      longest = std::max(longest, rank.steps > 0 ? 1000 * rank.seconds / rank.steps : 0);
    }
    return longest;
  }
  static GpuNumbers gpu_of(const RankNumbers& rank) {
    return rank.device ? rank.device->numbers : GpuNumbers{};
  }

  bool is_throttled(std::size_t rank) const {
    const auto clocks = clock.of(rank);
    return clocks.own < kThrottledClock * clocks.others;
  }
  bool is_slow(std::size_t rank) const {
    const auto times = busy.of(rank);
    const auto exceeds = [&](double factor, double share) {
      return times.own > factor * times.others && times.own - times.others > share * step_ms;
    };
    return exceeds(kSlowFactor, kSlowShare) ||
           (exceeds(kThrottledFactor, kThrottledShare) && is_throttled(rank));
  }

  const double step_ms;
  const NumberOfRanks busy, loader_wait, clock, utilisation;
};

std::string rounded(double number, int digits) {
  TextStream out;
  out << std::fixed;
  out.precision(digits);
  out << number;
  return out.str();
}

/// "; 91 degrees"; empty if the number is unknown.
std::string if_known(double number, const char* unit) {
  return std::isnan(number) ? "" : concat("; ", rounded(number, 0), unit);
}

std::string describe_clock(const Comparison& clock, const GpuNumbers& gpu) {
  std::string text =
      concat("its GPU runs at ", rounded(clock.own, 0), " MHz (others ", rounded(clock.others, 0),
             ")", if_known(gpu.temperature_c, " degrees"), if_known(gpu.power_w, " W"));
  if (!std::isnan(gpu.throttle_reasons)) {
    const auto reasons = static_cast<unsigned long long>(gpu.throttle_reasons);
    text += "; limited by: " + nvml::describe_throttle_reasons(reasons);
  }
  return text;
}

/// Why `rank` is busy longer than the others, from the numbers that are known.
std::string find_cause(const Numbers& numbers, std::size_t rank, const GpuNumbers& gpu) {
  const auto busy = numbers.busy.of(rank);
  const auto loader = numbers.loader_wait.of(rank);
  const double loader_of_others = std::isnan(loader.others) ? 0 : loader.others;
  if (loader.own - loader_of_others >= (busy.own - busy.others) / 2) {
    return concat("its loader made it wait ", rounded(loader.own, 1), " ms a step (others ",
                  rounded(loader_of_others, 1), ")");
  }
  const auto clock = numbers.clock.of(rank);
  if (numbers.is_throttled(rank)) {
    return describe_clock(clock, gpu);
  }
  std::string text = "it computes more than the others, or its ";
  text += std::isnan(clock.own) ? "processor" : "GPU or host";
  text += " is slow or used by other programs";
  if (loader.is_known()) {
    text += "; its loader is not the cause";
  }
  if (clock.is_known()) {
    text += concat("; its GPU runs at ", rounded(clock.own, 0), " MHz like the others'");
  }
  if (const auto used = numbers.utilisation.of(rank); used.is_known()) {
    text += concat("; utilisation ", rounded(used.own, 0), " % (others ", rounded(used.others, 0),
                   " %)");
  }
  return text;
}

}  // namespace

Stragglers::Messages Stragglers::add(int64_t step, const std::vector<RankNumbers>& ranks) {
  stragglers_.resize(ranks.size());
  streaks_.resize(ranks.size());
  const Numbers numbers(ranks);
  Messages messages;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    auto& [num_slow, num_usual, first_slow_step, excess_ms] = streaks_[i];
    auto& straggler = stragglers_[i];
    const auto busy = numbers.busy.of(i);
    if (!busy.is_known()) {
      continue;
    }
    const bool is_slow = numbers.is_slow(i);
    num_slow = is_slow ? num_slow + 1 : 0;
    num_usual = is_slow ? 0 : num_usual + 1;
    if (num_slow == 1) {
      first_slow_step = step;
      excess_ms = 0;
    }
    excess_ms += (busy.own - busy.others) * ranks[i].steps;
    const bool was_straggler = straggler.since_step >= 0;
    if ((num_slow >= kStreak && excess_ms >= kLeastExcessMs) || (is_slow && was_straggler)) {
      straggler.since_step = was_straggler ? straggler.since_step : first_slow_step;
      straggler.cause = find_cause(numbers, i, Numbers::gpu_of(ranks[i]));
    }
    const auto& device = ranks[i].device;
    const auto name =
        concat("rank ", i, device ? concat(" (", device->host, ", ", device->name, ")") : "");
    if (straggler.since_step >= 0 && !was_straggler) {
      messages.warnings.push_back(concat(
          name, " has slowed the job down since step ", straggler.since_step, ": it is busy ",
          rounded(busy.own, 1), " of ", rounded(numbers.step_ms, 1), " ms a step, the others ",
          busy.others < 0.05 ? "less than 0.1" : rounded(busy.others, 1), "; ", straggler.cause));
    } else if (was_straggler && num_usual >= kStreak) {
      straggler = {};
      messages.infos.push_back(concat(name, " no longer slows the job down (step ", step, ")"));
    }
  }
  return messages;
}

}  // namespace ddp::detail
