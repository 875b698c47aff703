// SPDX-License-Identifier: Apache-2.0
// The texts saved with checkpoints, across a resume.
#include "train/checkpoint/checkpoint_texts.hpp"
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
  REQUIRE(num_found(log, "a setting differs from the checkpoint runs/step_3: optim.lr=0.1") == 1);
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

TEST_CASE("changed settings of a resumed run are listed by key") {
  using ddp::detail::changed_settings;
  const std::string saved =
      "optimizer:\n  type: sgd\n  momentum: 0.9\nlr_schedule:\n  lr: 0.5\nmodel:\n  depth: 18\n"
      "checkpoint:\n  dir: a\ntrain:\n  max_grad_norm: 1\n";
  CHECK(changed_settings(saved, saved, "").empty());
  const std::string now =
      "optimizer:\n  type: sgd\n  momentum: 0.8\nlr_schedule:\n  lr: 0.1\nmodel:\n  width: 64\n"
      "checkpoint:\n  dir: b\ntrain:\n  max_grad_norm: 0\n";
  CHECK(changed_settings(saved, now, "") ==
        std::vector<std::string>{
            "lr_schedule.lr=0.1 (saved with 0.5)", "model.width=64 (saved without this setting)",
            "optimizer.momentum=0.8 (saved with 0.9)", "train.max_grad_norm=0 (saved with 1)",
            "model.depth is not set (saved with 18)"});
  CHECK(changed_settings("no settings: [", now, "").empty());
  // Settings that only one side has count if not at the default; settings that both have always
  // count.
  CHECK(changed_settings(saved, now,
                         "model:\n  width: 64\n  depth: 18\ntrain:\n  max_grad_norm: 0\n") ==
        std::vector<std::string>{"lr_schedule.lr=0.1 (saved with 0.5)",
                                 "optimizer.momentum=0.8 (saved with 0.9)",
                                 "train.max_grad_norm=0 (saved with 1)"});
  CHECK(changed_settings("model:\n  depth: 18\n", "model:\n  width: 64\n",
                         "model:\n  width: 32\n  depth: 50\n") ==
        std::vector<std::string>{"model.width=64 (saved without this setting)",
                                 "model.depth is not set (saved with 18)"});
  CHECK(changed_settings("loader:\n  drop_last: true\n  num_workers: 1\n",
                         "loader:\n  drop_last: false\n  num_workers: 2\n", "") ==
        std::vector<std::string>{"loader.drop_last=false (saved with true)"});
  const std::string earlier =
      "optimizer:\n  type: sgd\n  skip_dead_taps: false\n"
      "context:\n  communicator:\n    nccl_algorithm: ring\n";
  CHECK(changed_settings(earlier, "optimizer:\n  type: sgd\n", "").empty());
}

TEST_CASE("the samples of a step follow from settings and ranks") {
  using ddp::detail::samples_per_step;
  CHECK(samples_per_step("train:\n  batch_size: 32\n", 4) == 128);
  CHECK(samples_per_step("train:\n  batch_size: 32\n  grad_accum_steps: 3\n", 2) == 192);
  CHECK(samples_per_step("train:\n  batch_size: 32\n  grad_accum_steps: 3\nloader:\n"
                         "  global_batch_size: 48\n",
                         2) == 144);
  for (const char* unknown : {"", "mine: 1\n", "train:\n  batch_size: many\n", "a: ["}) {
    CHECK(samples_per_step(unknown, 2) == 0);
  }
}
