// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint_texts.hpp"

#include <utility>

#include "comm/group_choices.hpp"
#include "comm/kernel_choices.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "train/changed_settings.hpp"

namespace ddp::detail {

CheckpointTexts::CheckpointTexts(const CheckpointOptions& options,
                                 std::weak_ptr<Communicator> communicator, bool is_main)
    : default_settings_(options.default_settings_text),
      pins_plan_(!options.read_only),
      communicator_(std::move(communicator)),
      is_main_(is_main) {
  if (!options.settings_text.empty()) {
    texts_["settings"] = options.settings_text;
  }
  if (!options.plan_text.empty()) {
    texts_["plan"] = options.plan_text;
  }
}

std::string CheckpointTexts::get(const std::string& name) const {
  const auto found = texts_.find(name);
  return found == texts_.end() ? "" : found->second;
}

void CheckpointTexts::warn_of_changed_settings(const std::string& saved, const std::string& now,
                                               const std::string& path) const {
  if (!is_main_) {
    return;
  }
  for (const auto& change : changed_settings(saved, now, default_settings_)) {
    log_warning(concat("another setting than ", path, " was saved with: ", change));
  }
}

void CheckpointTexts::adopt_plan(const std::string& path) const {
  const auto communicator = communicator_.lock();
  const auto plan = texts_.find("plan");
  if (plan == texts_.end() || communicator == nullptr || !pins_plan_) {
    return;
  }
  try {
    communicator->choices().adopt(plan->second, path);
  } catch (const ReadError& error) {  // on all ranks; nothing of the run depends on it
    if (is_main_) {
      log_warning(concat("the measured choices in ", path,
                         " cannot be read, they are measured anew: ", error.what()));
    }
  }
}

void CheckpointTexts::load(const std::map<std::string, std::string>& saved,
                           const std::string& path) {
  const auto own = std::exchange(texts_, saved);
  if (const auto settings = own.find("settings"); settings != own.end()) {
    warn_of_changed_settings(texts_["settings"], settings->second, path);
    texts_["settings"] = settings->second;
  }
  adopt_plan(path);
}

const std::map<std::string, std::string>& CheckpointTexts::collect() {
  if (const auto communicator = communicator_.lock(); communicator != nullptr && is_main_) {
    keep_kernel_choices(communicator->choices().plan());
    if (!communicator->choices().plan().empty()) {
      texts_["plan"] = communicator->choices().plan().to_json();
    }
  }
  return texts_;
}

}  // namespace ddp::detail
