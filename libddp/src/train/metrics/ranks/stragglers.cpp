// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/ranks/stragglers.hpp"

#include <algorithm>
#include <cmath>

#include "ddp/core/error.hpp"
#include "ddp/detail/text_stream.hpp"

namespace ddp::detail {
namespace {

constexpr double kSlowFactor = 1.5;
constexpr double kSlowFactorOfThrottled = 1.1;
constexpr double kThrottledClock = 0.9;
constexpr int kStreak = 3;

/// NaN without known numbers.
double median(std::vector<double> numbers) {
  std::erase_if(numbers, [](double number) { return std::isnan(number); });
  if (numbers.empty()) {
    return NAN;
  }
  std::sort(numbers.begin(), numbers.end());
  const auto half = numbers.size() / 2;
  return numbers.size() % 2 == 1 ? numbers[half] : (numbers[half - 1] + numbers[half]) / 2;
}

/// A number of one rank, and the median of the others.
struct Beside {
  double own = NAN;
  double others = NAN;
};

template <typename Number>
Beside beside(const std::vector<RankNumbers>& ranks, std::size_t rank, const Number& number) {
  std::vector<double> others;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i != rank) {
      others.push_back(number(ranks[i]));
    }
  }
  return {.own = number(ranks[rank]), .others = median(std::move(others))};
}

double clock_of(const RankNumbers& rank) {
  return rank.device ? rank.device->numbers.sm_clock_mhz : NAN;
}

double utilisation_of(const RankNumbers& rank) {
  return rank.device ? rank.device->numbers.utilisation_percent : NAN;
}

bool is_throttled(const Beside& clock) {
  return clock.own < kThrottledClock * clock.others;
}

std::string decimals(double number, int digits) {
  TextStream out;
  out << std::fixed;
  out.precision(digits);
  out << number;
  return out.str();
}

/// What limits the clock, from NVML's bits.
std::string limits_of(double bits) {
  if (std::isnan(bits)) {
    return "";
  }
  const auto mask = static_cast<unsigned long long>(bits);
  std::string words;
  const auto add = [&](unsigned long long bit, const char* word) {
    if ((mask & bit) != 0) {
      words += concat(words.empty() ? "; limited by " : " and ", word);
    }
  };
  add(nvml::kPowerCap, "its power cap");
  add(nvml::kSoftwareHeat | nvml::kHardwareHeat, "its temperature");
  add(nvml::kPowerBrake, "the power supply");
  return words;
}

/// Why `rank` is busy longer than the others.
std::string find_cause(const std::vector<RankNumbers>& ranks, std::size_t rank,
                       const Beside& busy) {
  const auto loader =
      beside(ranks, rank, [](const RankNumbers& numbers) { return numbers.loader_wait_ms; });
  if (loader.own - std::fmax(0, loader.others) >= (busy.own - busy.others) / 2) {
    return concat("its loader made it wait ", decimals(loader.own, 1), " ms a step (others ",
                  decimals(std::fmax(0, loader.others), 1), ")");
  }
  const auto clock = beside(ranks, rank, clock_of);
  if (is_throttled(clock)) {
    const auto& gpu = ranks[rank].device->numbers;
    return concat("its GPU runs at ", decimals(clock.own, 0), " MHz (others ",
                  decimals(clock.others, 0), "), ", decimals(gpu.temperature_c, 0), " degrees, ",
                  decimals(gpu.power_w, 0), " W", limits_of(gpu.clock_limits));
  }
  const auto used = beside(ranks, rank, utilisation_of);
  const bool is_gpu = !std::isnan(used.own);
  return concat("its loader", is_gpu ? " and its GPU's clock are" : " is",
                " no cause: it computes more than the others, or its ",
                is_gpu ? concat("GPU or host is slow or shared (utilisation ",
                                decimals(used.own, 0), " %, others ", decimals(used.others, 0),
                                " %)")
                       : std::string("processor is slow or shared"));
}

std::string describe(const std::vector<RankNumbers>& ranks, std::size_t rank, const Beside& busy,
                     double step_ms, const Straggler& straggler) {
  const auto& device = ranks[rank].device;
  return concat("rank ", rank, device ? concat(" (", device->host, ", ", device->name, ")") : "",
                " slows the job down since step ", straggler.since_step, ": it is busy ",
                decimals(busy.own, 1), " of ", decimals(step_ms, 1), " ms a step, the others ",
                decimals(busy.others, 1), "; ", straggler.cause);
}

}  // namespace

Stragglers::News Stragglers::add(int64_t step, const std::vector<RankNumbers>& ranks) {
  stragglers_.resize(ranks.size());
  streaks_.resize(ranks.size());
  double step_ms = 0;  // a step ends on all ranks together
  for (const auto& rank : ranks) {
    step_ms = std::max(step_ms, rank.steps > 0 ? 1000 * rank.seconds / rank.steps : 0);
  }
  const auto busy_of = [&](const RankNumbers& rank) {
    const double ms = step_ms - rank.exposed_comm_ms;
    return ms < 0 ? 0 : ms;  // NaN stays
  };
  News news;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    auto& [num_slow, num_usual, first_slow_step] = streaks_[i];
    auto& straggler = stragglers_[i];
    const auto busy = beside(ranks, i, busy_of);
    const bool is_slow =
        busy.own > kSlowFactor * busy.others || (busy.own > kSlowFactorOfThrottled * busy.others &&
                                                 is_throttled(beside(ranks, i, clock_of)));
    num_slow = is_slow ? num_slow + 1 : 0;
    num_usual = is_slow ? 0 : num_usual + 1;
    if (num_slow == 1) {
      first_slow_step = step;
    }
    if (straggler.since_step < 0 && num_slow >= kStreak) {
      straggler = {.since_step = first_slow_step, .cause = find_cause(ranks, i, busy)};
      news.warning += concat(news.warning.empty() ? "" : "\n",
                             describe(ranks, i, busy, step_ms, straggler));
    } else if (straggler.since_step >= 0 && num_usual >= kStreak) {
      straggler = {};
      news.info += concat(news.info.empty() ? "" : "\n", "rank ", i,
                          " no longer slows the job down (step ", step, ")");
    }
  }
  return news;
}

}  // namespace ddp::detail
