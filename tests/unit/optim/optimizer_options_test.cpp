// SPDX-License-Identifier: Apache-2.0
#include "ddp/optim/make_optimizer.hpp"

#include <map>

#include "core/settings/setting_row.hpp"
#include "core/settings/settings.hpp"
#include "ddp/optim/lr_schedule.hpp"
#include "optim/parameter_settings.hpp"
#include "support/catch.hpp"
#include "unit/optim/optim_test_support.hpp"

using namespace optim_test;
using ddp::OptimizerOptions;

namespace {

// Records the printed texts of lists of text, and sets the list named `name_to_set`.
class ListVisitor : public ddp::FieldVisitor {
 public:
  void field(const ddp::Field& field, bool&) override { names.push_back(field.name); }
  void field(const ddp::Field& field, int64_t&) override { names.push_back(field.name); }
  void field(const ddp::Field& field, double&) override { names.push_back(field.name); }
  void field(const ddp::Field& field, ddp::NumberOrAuto&) override { names.push_back(field.name); }
  void field(const ddp::Field& field, std::string&) override { names.push_back(field.name); }
  void field(const ddp::Field& field, std::vector<int64_t>&) override {
    names.push_back(field.name);
  }
  void field(const ddp::Field& field, std::vector<double>&) override {
    names.push_back(field.name);
  }
  void field(const ddp::Field& field, std::vector<std::string>& value) override {
    names.push_back(field.name);
    if (set) {
      value = *set;
    }
    shown = value;
  }
  void enter_section(const std::string&) override {}
  void leave_section() override {}
  std::vector<std::string> names;
  std::vector<std::string> shown;
  std::optional<std::vector<std::string>> set;
};

}  // namespace

TEST_CASE("Groups are read from texts and shown as the same texts", "[optim]") {
  OptimizerOptions options;
  ListVisitor reader;
  reader.set = {"fc.*,head.* lr_scale=0.1", "*.bias weight_decay=0",
                "x lr_scale=2 weight_decay=0.05"};
  describe_fields(options, reader);
  REQUIRE(options.groups.size() == 3);
  CHECK(options.groups[0].patterns == std::vector<std::string>{"fc.*", "head.*"});
  CHECK(options.groups[0].lr_scale == 0.1);
  CHECK_FALSE(options.groups[0].weight_decay.has_value());
  CHECK(options.groups[1].weight_decay == 0.0);
  CHECK(options.groups[2].lr_scale == 2.0);
  ListVisitor writer;
  describe_fields(options, writer);
  CHECK(writer.shown == *reader.set);
  CHECK(writer.names.front() == "type");
}

TEST_CASE("Groups mean the same in a file and in an override", "[optim]") {
  const auto groups_of = [](ddp::Settings settings) {
    OptimizerOptions options;
    settings.read("optimizer", options);
    return options.groups;
  };
  const auto from_file = [&](const std::string& groups) {
    ddp::Settings settings;
    settings.add_yaml("optimizer:\n  groups: " + groups + "\n", "run.yaml");
    return groups_of(settings);
  };
  const auto from_override = [&](const std::string& groups) {
    ddp::Settings settings;
    settings.add_override("optimizer.groups=" + groups);
    return groups_of(settings);
  };
  const std::string one = "conv1.*,fc.* lr_scale=0.1";
  const std::string two = "*.bias weight_decay=0";
  for (const auto& groups :
       {from_file("[\"" + one + "\", \"" + two + "\"]"),
        from_file("[conv1.*, fc.* lr_scale=0.1, '" + two + "']"), from_override(one + "," + two),
        from_override("[" + one + ", " + two + "]")}) {
    REQUIRE(groups.size() == 2);
    CHECK(groups[0].patterns == std::vector<std::string>{"conv1.*", "fc.*"});
    CHECK(groups[0].lr_scale == 0.1);
    CHECK(groups[1].patterns == std::vector<std::string>{"*.bias"});
    CHECK(groups[1].weight_decay == 0.0);
  }
  CHECK(from_override("").empty());
  CHECK_THROWS_WITH(from_override("fc.* lr_scale=0.1,conv1.*"),
                    Catch::Contains("\"conv1.*\" names parameters and no setting"));
  // A group without its own settings is printed in a form that reads back.
  OptimizerOptions exempt;
  exempt.groups = {{.patterns = {"fc.bias"}}, {.patterns = {"fc.*"}, .lr_scale = 0.5}};
  ddp::Settings saved;
  saved.add_yaml(ddp::settings_yaml(ddp::list_settings("optimizer", exempt)), "saved.yaml");
  CHECK(groups_of(saved).size() == 2);
}

TEST_CASE("Removed optimizer settings are refused by name", "[optim]") {
  for (const std::string key : {"overlap_backward", "skip_dead_taps"}) {
    ddp::Settings settings;
    settings.add_yaml("optimizer:\n  " + key + ": false\n", "run.yaml");
    OptimizerOptions options;
    CHECK(message_of<ddp::SettingsError>([&] { settings.read("optimizer", options); }) ==
          "run.yaml:2: optimizer." + key + " was removed; delete it");
  }
}

TEST_CASE("Wrong optimizer settings are refused by name", "[optim]") {
  const auto refusal = [](OptimizerOptions options) {
    return message_of<ddp::SettingsError>([&] { ddp::detail::validate(options); });
  };
  OptimizerOptions options;
  CHECK(refusal(options).empty());
  options.nesterov = true;
  CHECK(contains(refusal(options), "optimizer.nesterov needs optimizer.momentum > 0"));
  options = {};
  options.beta2 = 1.0;
  CHECK(contains(refusal(options), "optimizer.beta2 is 1"));
  options = {};
  options.weight_decay = -0.1;
  CHECK(contains(refusal(options), "optimizer.weight_decay is -0.1"));
  for (const char* text : {"fc.* lr_scale=abc", "fc.* decay=1", "fc.* lr_scale"}) {
    ListVisitor reader;
    reader.set = {text};
    options = {};
    CHECK(contains(message_of<ddp::SettingsError>([&] { describe_fields(options, reader); }),
                   "optimizer.groups"));
  }
}
