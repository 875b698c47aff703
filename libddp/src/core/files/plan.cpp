// SPDX-License-Identifier: Apache-2.0
#include "core/files/plan.hpp"

#include <cerrno>
#include <nlohmann/json.hpp>

#include "core/control/wire/bounded_json.hpp"
#include "core/files/file_ops.hpp"
#include "core/files/plan_file.hpp"
#include "core/settings/setting_row.hpp"
#include "ddp/core/error.hpp"

namespace ddp {
namespace {

using Json = nlohmann::json;

constexpr const char* kIdentity = "measured on";
constexpr const char* kChoices = "choices";
constexpr std::size_t kMaxBytes = std::size_t{1} << 20;  // a plan has some kilobytes
constexpr int kMaxChoiceDepth = 8;
constexpr int kMaxPlanDepth = kMaxChoiceDepth + 2;  // the choices are nested in two objects

[[noreturn]] void fail(const std::string& origin, const std::string& why) {
  throw ReadError(concat(origin, " is not a plan of measured choices: ", why,
                         "; fix: remove it, and the choices are measured again"));
}

std::string first_difference(const Plan::Identity& theirs, const Plan::Identity& ours) {
  for (const auto& [name, value] : ours) {
    const auto found = theirs.find(name);
    const std::string other = found == theirs.end() ? "unknown" : found->second;
    if (other != value) {
      return concat(name, ": ", other, ", here ", value);
    }
  }
  // Earlier versions had other algorithms of reductions. "no" stands for NCCL's own.
  const auto windows = theirs.find("windows");
  if (windows != theirs.end() && windows->second != "no") {
    return concat("windows: ", windows->second, ", here no");
  }
  return {};
}

Json parse(const std::string& json, const std::string& origin) {
  if (json.size() > kMaxBytes) {
    fail(origin, concat("it has ", json.size(), " bytes, at most ", kMaxBytes, " are read"));
  }
  const auto parsed = [&] {
    try {
      return detail::parse_bounded_json<Json>(json, kMaxPlanDepth);
    } catch (const ReadError& error) {
      fail(origin, error.what());
    } catch (const Json::exception&) {
      return Json();
    }
  }();
  if (!parsed.is_object() || !parsed.contains(kIdentity) || !parsed[kIdentity].is_object() ||
      !parsed.contains(kChoices) || !parsed[kChoices].is_object()) {
    fail(origin, concat("\"", kIdentity, "\" and \"", kChoices, "\" are expected"));
  }
  return parsed;
}

}  // namespace

std::optional<std::string> Plan::find(const std::string& name) const {
  const auto found = choices_.find(name);
  return found == choices_.end() ? std::nullopt : std::optional(found->second);
}

void Plan::set(const std::string& name, const std::string& json) {
  try {
    detail::parse_bounded_json<Json>(json, kMaxChoiceDepth);
  } catch (const std::exception& error) {
    throw SettingsError(concat("the plan's choice ", name, " is not JSON of at most ",
                               kMaxChoiceDepth, " levels: ", json.substr(0, 80), ": ",
                               error.what()));
  }
  choices_[name] = json;
  ++version_;
}

std::string Plan::to_json() const {
  Json json;
  json[kIdentity] = Json::object();
  for (const auto& [name, value] : identity_) {
    json[kIdentity][name] = value;
  }
  json[kChoices] = Json::object();
  for (const auto& [name, value] : choices_) {
    json[kChoices][name] = Json::parse(value);
  }
  return json.dump(1);
}

std::string Plan::adopt(const std::string& json, const std::string& origin) {
  const auto parsed = parse(json, origin);
  Identity theirs;
  for (const auto& [name, value] : parsed[kIdentity].items()) {
    if (!value.is_string()) {
      fail(origin, concat("\"", name, "\" in \"", kIdentity, "\" is not a string"));
    }
    theirs[name] = value.get<std::string>();
  }
  const auto difference = first_difference(theirs, identity_);
  if (!difference.empty()) {
    return difference;
  }
  for (const auto& [name, value] : parsed[kChoices].items()) {
    choices_[name] = value.dump();
  }
  ++version_;
  return {};
}

std::string read_plan_file(const std::string& path) {
  std::string why;
  auto text = detail::read_start(path, kMaxBytes + 1, why);
  if (!text) {
    if (errno == ENOENT) {
      return {};
    }
    throw ReadError(concat(path, ": ", why));
  }
  if (text->size() > kMaxBytes) {
    fail(path, concat("a file of at most ", kMaxBytes, " bytes is expected"));
  }
  return *std::move(text);
}

void write_plan_file(const std::string& path, const Plan& plan) {
  const auto text = plan.to_json() + "\n";
  replace_file(system_file_ops(), path, {text});
}

}  // namespace ddp
