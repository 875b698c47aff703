// SPDX-License-Identifier: Apache-2.0
// Compares with torch.optim.lr_scheduler: tests/golden/make_lr_schedule_golden.py.
#include "ddp/optim/lr_schedule.hpp"

#include "support/catch.hpp"
#include "unit/optim/optim_test_support.hpp"

using namespace optim_test;
using ddp::LrSchedule;
using ddp::LrScheduleOptions;
using ddp::LrScheduleType;

namespace {

LrScheduleOptions options_of(const nlohmann::json& json) {
  const std::map<std::string, LrScheduleType> types = {{"step", LrScheduleType::Step},
                                                       {"multi_step", LrScheduleType::MultiStep},
                                                       {"cosine", LrScheduleType::Cosine},
                                                       {"linear", LrScheduleType::Linear},
                                                       {"one_cycle", LrScheduleType::OneCycle}};
  LrScheduleOptions o;
  o.type = types.at(json["type"]);
  o.lr = json["lr"];
  o.total_steps = json.value("total_steps", o.total_steps);
  o.warmup_steps = json.value("warmup_steps", o.warmup_steps);
  o.warmup_start_factor = json.value("warmup_start_factor", o.warmup_start_factor);
  o.min_lr = json.value("min_lr", o.min_lr);
  o.gamma = json.value("gamma", o.gamma);
  o.step_size = json.value("step_size", o.step_size);
  o.milestones = json.value("milestones", o.milestones);
  o.pct_start = json.value("pct_start", o.pct_start);
  o.div_factor = json.value("div_factor", o.div_factor);
  o.final_div_factor = json.value("final_div_factor", o.final_div_factor);
  o.linear_anneal = json.value("linear_anneal", o.linear_anneal);
  o.three_phase = json.value("three_phase", o.three_phase);
  return o;
}

std::string refusal(const LrScheduleOptions& options) {
  return message_of<ddp::SettingsError>([&] { LrSchedule{options}; });
}

}  // namespace

TEST_CASE("Schedules equal torch.optim.lr_scheduler's", "[optim]") {
  const nlohmann::json golden = read_golden("lr_schedule_golden.json");
  REQUIRE(golden["cases"].size() == 10);
  for (const auto& [name, golden_case] : golden["cases"].items()) {
    INFO(name);
    const LrSchedule schedule(options_of(golden_case["options"]));
    const auto expected = golden_case["lr"].get<std::vector<double>>();
    // OneCycleLR and libddp compute each value directly: only libm's cosine may differ. The other
    // schedulers multiply the last value by a factor, which accumulates a few 1e-16 per step.
    const bool fresh = golden_case["options"]["type"] == "one_cycle";
    const double tolerance = (fresh ? 4e-16 : 1e-13) * schedule.options().lr;
    for (size_t step = 0; step < expected.size(); ++step) {
      INFO("step " << step);
      CHECK(std::abs(schedule.at(static_cast<int64_t>(step)) - expected[step]) <= tolerance);
    }
  }
}

TEST_CASE("A constant schedule warms up along a line and stays", "[optim]") {
  LrScheduleOptions options;
  options.lr = 0.5;
  CHECK(LrSchedule(options).at(0) == 0.5);
  CHECK(LrSchedule(options).at(1'000'000) == 0.5);
  options.warmup_steps = 4;
  options.warmup_start_factor = 0.0;
  const LrSchedule schedule(options);
  CHECK(schedule.at(0) == 0.0);
  CHECK(schedule.at(1) == 0.125);
  CHECK(schedule.at(3) == 0.375);
  CHECK(schedule.at(4) == 0.5);
}

TEST_CASE("Beyond the end schedules keep their last value", "[optim]") {
  LrScheduleOptions options;
  options.lr = 0.5;
  options.total_steps = 20;
  options.min_lr = 0.125;
  options.type = LrScheduleType::Cosine;
  CHECK(LrSchedule(options).at(20) == 0.125);
  CHECK(LrSchedule(options).at(25) == 0.125);
  options.type = LrScheduleType::Linear;
  CHECK(LrSchedule(options).at(25) == 0.125);
  options.type = LrScheduleType::OneCycle;
  const LrSchedule one_cycle(options);
  CHECK(one_cycle.at(19) == Approx(0.5 / 25.0 / 1e4));
  CHECK(one_cycle.at(25) == one_cycle.at(19));
}

TEST_CASE("Wrong schedule settings are refused by name", "[optim]") {
  LrScheduleOptions options;
  options.lr = -1.0;
  CHECK(contains(refusal(options), "lr_schedule.lr is -1"));
  options = {};
  options.type = LrScheduleType::Cosine;
  CHECK(contains(refusal(options), "lr_schedule.total_steps is 0"));
  CHECK(contains(refusal(options), "fix: set lr_schedule.total_steps or train.max_steps"));
  CHECK(contains(refusal(options), "LrSchedule(options, num_steps) in the program"));
  CHECK(ddp::LrSchedule(options, 20).options().total_steps == 20);
  CHECK(ddp::LrSchedule(options, 20).at(20) == options.min_lr);
  options.total_steps = 5;
  options.warmup_steps = 5;
  CHECK(contains(refusal(options), "must be more than warmup_steps (5)"));
  options = {};
  options.type = LrScheduleType::Step;
  CHECK(contains(refusal(options), "lr_schedule.step_size is 0"));
  options.type = LrScheduleType::MultiStep;
  options.milestones = {5, 3};
  CHECK(contains(refusal(options), "lr_schedule.milestones must ascend"));
  options = {};
  options.type = LrScheduleType::OneCycle;
  options.total_steps = 100;
  options.pct_start = 1.5;
  CHECK(contains(refusal(options), "lr_schedule.pct_start is 1.5"));
  options.pct_start = 0.3;
  options.warmup_steps = 3;
  CHECK(contains(refusal(options), "one_cycle warms up by itself"));
}
