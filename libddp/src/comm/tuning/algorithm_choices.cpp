// SPDX-License-Identifier: Apache-2.0
#include "comm/tuning/algorithm_choices.hpp"

#include <nlohmann/json.hpp>

#include "ddp/core/error.hpp"

namespace ddp::detail {

using Json = nlohmann::json;
using ops::detail::MeasuredChoice;
using ops::detail::MeasuredChoices;

namespace {

[[noreturn]] void fail(const std::string& why) {
  throw ReadError(concat("the plan's choices of algorithms (\"", kAlgorithmChoices,
                         "\") are damaged: ", why,
                         "; fix: remove the plan, and they are measured again"));
}

MeasuredChoice parse(const std::string& what, const Json& entry) {
  if (!entry.is_array() || entry.size() != 2 || !entry[0].is_number_unsigned() ||
      !entry[1].is_number_unsigned()) {
    fail(concat("\"", what.substr(0, 80), "\" is not [proposed, chosen]"));
  }
  const MeasuredChoice choice{entry[0].get<int64_t>(), entry[1].get<int64_t>()};
  if (choice.chosen < 0 || choice.chosen >= choice.count) {
    fail(concat("\"", what.substr(0, 80), "\" chooses number ", choice.chosen, " of ",
                choice.count));
  }
  return choice;
}

}  // namespace

std::string algorithm_choices_to_json(const MeasuredChoices& choices) {
  auto json = Json::object();
  for (const auto& [what, choice] : choices) {
    json[what] = {choice.count, choice.chosen};
  }
  return json.dump();
}

MeasuredChoices algorithm_choices_from_json(const std::string& json) {
  const auto parsed = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) {
    fail("a JSON object is expected");
  }
  MeasuredChoices choices;
  for (const auto& [what, entry] : parsed.items()) {
    choices[what] = parse(what, entry);
  }
  return choices;
}

void save_algorithm_choices(Plan& plan) {
  const auto choices = ops::detail::ChoiceBook::instance().all();
  if (choices.empty()) {
    return;
  }
  const auto json = algorithm_choices_to_json(choices);
  if (plan.find(kAlgorithmChoices) != json) {
    plan.set(kAlgorithmChoices, json);
  }
}

}  // namespace ddp::detail
