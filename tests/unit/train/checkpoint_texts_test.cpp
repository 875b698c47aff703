// SPDX-License-Identifier: Apache-2.0
// The texts saved with checkpoints, across a resume.
#include "train/checkpoint_texts.hpp"
#include "support/catch.hpp"
#include "support/stderr_of.hpp"

namespace {

using ddp::detail::CheckpointTexts;
using testing::num_found;
using testing::stderr_of;
using TextMap = std::map<std::string, std::string>;

ddp::CheckpointOptions with_settings(const std::string& text) {
  ddp::CheckpointOptions options;
  options.settings_text = text;
  options.plan_text = "plan of this run";
  return options;
}

const TextMap kSaved{{"settings", "optim:\n  lr: 0.5\n"}, {"plan", "saved plan"}, {"note", "hi"}};

}  // namespace

TEST_CASE("a resumed run keeps its settings and takes the checkpoint's other texts") {
  CheckpointTexts texts(with_settings("optim:\n  lr: 0.1\n"), {}, /*is_main=*/true);
  texts.set("mine", "dropped by the resume");
  REQUIRE(texts.get("plan") == "plan of this run");
  REQUIRE(texts.get("absent").empty());
  const auto log = stderr_of([&] { texts.load(kSaved, "runs/step_3"); });
  REQUIRE(num_found(log, "another setting than runs/step_3 was saved with: optim.lr=0.1") == 1);
  REQUIRE(texts.collect() ==
          TextMap{{"settings", "optim:\n  lr: 0.1\n"}, {"plan", "saved plan"}, {"note", "hi"}});
}

TEST_CASE("a program without settings saves the checkpoint's, and other ranks log nothing") {
  CheckpointTexts without(ddp::CheckpointOptions{}, {}, /*is_main=*/true);
  REQUIRE(stderr_of([&] { without.load(kSaved, "runs/step_3"); }).empty());
  REQUIRE(without.collect() == kSaved);
  CheckpointTexts other(with_settings("optim:\n  lr: 0.1\n"), {}, /*is_main=*/false);
  REQUIRE(stderr_of([&] { other.load(kSaved, "runs/step_3"); }).empty());
  REQUIRE(other.get("settings") == "optim:\n  lr: 0.1\n");
}
