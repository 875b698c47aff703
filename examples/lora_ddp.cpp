// SPDX-License-Identifier: Apache-2.0
// Trains LoRA adapters on a Qwen2-like chat model, or (lora.rank=0) the whole model, data-parallel,
// on token files made by data/prepare_chat.py. `--help` lists options and settings.
//
//   mpirun -n 2 build/examples/lora_ddp --config examples/configs/lora_tiny.yaml
//   srun build/examples/lora_ddp --config examples/configs/lora_qwen2_7b.yaml model.path=FOLDER …
//   … run.mode=evaluate decode.num_prompts=100
//   tools/chat.py --config examples/configs/lora_tiny.yaml lora.adapter=FOLDER
//
// The last two commands do not train. They report loss, accuracy and answers of the newest
// checkpoint, or of lora.adapter=FOLDER, and chat with it.
#include <torch/torch.h>

#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>

#include "common/run_plan.hpp"
#include "common/training_report.hpp"
#include "ddp/ddp.hpp"
#include "ddp/detail/text.hpp"
#include "language/base_tokenizer.hpp"
#include "language/decode_prompts.hpp"
#include "language/language_options.hpp"
#include "language/language_sections.hpp"
#include "language/language_trainer.hpp"
#include "language/prompt_loop.hpp"
#include "language/trained_folder.hpp"
#include "models/lora.hpp"
#include "models/pretrained/peft_adapter.hpp"
#include "models/qwen2.hpp"

namespace {

using examples::DecodeSettings;
using examples::LanguageTrainer;
using examples::LoraSettings;
using examples::Qwen2Settings;
using examples::RunSettings;
using examples::TrainedFolder;

std::string trainable_line(const models::LoraSummary& lora) {
  const auto trainable = static_cast<double>(lora.num_trainable);
  const double all = trainable + static_cast<double>(lora.num_frozen);
  if (lora.layers.empty()) {
    return examples::format("trainable       all %.4g M parameters", all / 1e6);
  }
  return examples::format(
      "trainable       %.4g M of %.4g M parameters (%.2f %%), adapters on %zu layers",
      trainable / 1e6, all / 1e6, 100 * trainable / all, lora.layers.size());
}

void decode(LanguageTrainer& trainer, const DecodeSettings& settings, const ddp::Config& cfg,
            const ddp::Context& ctx, const char* when) {
  if (settings.num_prompts == 0) {
    return;
  }
  const auto result = examples::decode_prompts(dynamic_cast<models::CausalLm&>(trainer.module()),
                                               *trainer.data().eval, settings, cfg.amp, ctx,
                                               cfg.checkpoint.stop_check_seconds);
  if (!result.stopped_by.empty()) {
    examples::stop_beside_training(cfg, result.stopped_by, "decoding prompts");
  }
  if (ctx.is_main()) {
    std::cout << ddp::detail::printable(result.shown) << "decoded" << when << ": "
              << result.to_string() << '\n'
              << std::flush;
  }
}

/// Folder for the trained weights.
examples::TrainedFolderOptions trained_folder(const LoraSettings& lora, const ddp::Config& cfg,
                                              const std::string& base_path,
                                              const models::TokenDataset& data) {
  examples::TrainedFolderOptions options{.path = lora.save_dir,
                                         .from = {.base_path = base_path,
                                                  .tokens_path = data.options().path,
                                                  .end_tokens = data.tokenizer().end_tokens()}};
  if (lora.save_dir.empty() && !cfg.checkpoint.dir.empty()) {
    options.path = cfg.checkpoint.dir + (lora.options.rank > 0 ? "/adapters" : "/models");
    options.is_in_checkpoint_dir = true;
  }
  return options;
}

/// Everything that a run needs in addition to its trainer.
struct Run {
  const ddp::Context& ctx;
  ddp::Config cfg;
  RunSettings run;
  DecodeSettings decode;
  LoraSettings lora;
  Qwen2Settings model;
  models::LoraSummary summary;  ///< result of add_lora
};

/// Identity of the base, read once per run.
std::string base_identity(LanguageTrainer& trainer) {
  const auto& module = dynamic_cast<const models::LanguageModel&>(trainer.module());
  return models::base_identity(module.head_weight().scalar_type(),
                               trainer.model().frozen_fingerprint());
}

void evaluate(LanguageTrainer& trainer, const Run& run) {
  std::string what = run.lora.adapter.empty() ? "the untrained model" : run.lora.adapter;
  if (run.lora.adapter.empty() && !run.cfg.checkpoint.dir.empty()) {
    what = run.cfg.checkpoint.dir + " after step " + std::to_string(trainer.restore_model());
  }
  const auto result = trainer.evaluate();
  if (run.ctx.is_main()) {
    std::cout << "\nevaluated       " << what
              << examples::format(
                     "\neval loss       %.4f, token accuracy %.2f %%, over %lld targets\n",
                     result.loss, 100 * result.accuracy, static_cast<long long>(result.num_targets))
              << std::flush;
  }
  decode(trainer, run.decode, run.cfg, run.ctx, "");
}

/// Describes settings that a checkpoint's tensors do not show.
std::string adapters_text(const LoraSettings& lora, const models::LoraSummary& summary) {
  if (summary.layers.empty()) {
    return "no adapters";
  }
  return ddp::concat("adapters of rank ", lora.options.rank, " and alpha ", lora.options.alpha,
                     " on ", summary.layers.size(), " layers",
                     lora.options.fp8_base ? ", on a base in FP8" : "");
}

void chat(const std::shared_ptr<models::CausalLm>& module, const examples::TokenData& data,
          ddp::Context& ctx, Run run) {
  if (!run.lora.adapter.empty()) {
    models::require_base(run.lora.adapter, models::base_identity(*module));
    run.cfg.checkpoint.dir = "";
  }
  examples::load_for_generation(ctx, run.cfg, module, data, adapters_text(run.lora, run.summary));
  examples::answer_prompts(*module, *data.train, run.model.common,
                           {.max_new_tokens = run.decode.max_new_tokens,
                            .temperature = run.decode.temperature,
                            .top_k = run.decode.top_k,
                            .seed = run.decode.seed},
                           run.cfg.amp);
}

const models::Qwen2Impl& qwen2_of(LanguageTrainer& trainer) {
  return dynamic_cast<const models::Qwen2Impl&>(trainer.module());
}

/// Saves the weights of a stopped run, like those of a finished one.
void save_at_stop(TrainedFolder& folder, int64_t steps_done, const ddp::Context& ctx) {
  try {
    folder.save_last();
    if (ctx.is_main() && !folder.summary().empty()) {
      ddp::log_info(ddp::concat("stopped after ", steps_done, " steps: saved ", folder.summary()));
    }
  } catch (const std::exception& error) {  // the run ends with the stop, not with this error
    ddp::log_error(std::string("the weights at the stop were not saved: ") + error.what());
  }
}

void train(LanguageTrainer& trainer, const Run& run) {
  const bool adapts = run.lora.options.rank > 0;
  const auto base = trainer.model().frozen_fingerprint();
  const auto before = examples::parameter_hash(trainer.model().trained_parameters());
  const int64_t first_step = trainer.restore();
  auto saved = trained_folder(run.lora, run.cfg, run.model.common.path, *trainer.data().train);
  saved.from.base_identity = adapts ? base_identity(trainer) : "";
  TrainedFolder folder(run.ctx, trainer.checkpointer(), qwen2_of(trainer), saved);
  folder.open(first_step);  // throws before training, not after it
  if (first_step == 0 && run.cfg.train.eval_first) {
    decode(trainer, run.decode, run.cfg, run.ctx, " before training");
  }
  trainer.on_evaluation = [&](int64_t steps_done, const examples::EvalResult&, bool is_best) {
    if (is_best) {
      folder.save_best(steps_done);
    }
  };
  // Writing a whole model takes longer than the time after a signal, and the checkpoint already
  // holds it.
  if (adapts || run.cfg.checkpoint.dir.empty()) {
    trainer.checkpointer().set_before_stop(
        [&](int64_t steps_done) { save_at_stop(folder, steps_done, run.ctx); });
  }
  const auto summary = trainer.train();
  folder.save_last();
  if (trainer.model().compute_frozen_fingerprint() != base) {
    throw std::logic_error("training changed the frozen base");
  }
  if (run.ctx.is_main()) {
    std::cout << examples::language_report(summary, trainer, run.ctx, run.cfg)
              << trainable_line(run.summary) << '\n'
              << (adapts ? "adapters        " : "model           ") << summary.hash << ", "
              << (summary.hash == before ? "unchanged" : "changed from " + before)
              << (folder.summary().empty() ? "" : "; " + folder.summary()) << '\n'
              << (adapts ? "base            " + base + ", unchanged\n" : "") << std::flush;
  }
  decode(trainer, run.decode, run.cfg, run.ctx, " after training");
}

void run(ddp::Context& ctx, const ddp::Config& config) {
  Run run{.ctx = ctx,
          .cfg = config,
          .run = config.section<RunSettings>("run"),
          .decode = config.section<DecodeSettings>("decode"),
          .lora = config.section<LoraSettings>("lora"),
          .model = config.section<Qwen2Settings>("model"),
          .summary = {}};
  const bool chats = run.run.mode == "chat";
  if (chats) {
    examples::require_prompt_settings(ctx, config, run.model.common, run.lora.adapter);
  }
  examples::use_base_dtype(run.model, ctx, run.lora);
  const auto data = examples::open_token_data(config.section<examples::ChatOptions>("tokens"));
  if (ctx.is_main()) {
    examples::require_base_tokenizer(*data.train, run.model.common);
  }
  auto module = examples::make_qwen2(run.model, data.train->tokenizer().vocab_size, ctx);
  run.summary = examples::add_adapters(*module, run.lora);
  if (chats) {
    chat(module, data, ctx, run);
    return;
  }
  if (ctx.is_main()) {
    std::cout << data.train->summary() << '\n'
              << data.eval->summary() << '\n'
              << trainable_line(run.summary) << '\n'
              << std::flush;
  }
  const bool evaluates =
      run.run.mode == "evaluate" || run.cfg.checkpoint.resume == ddp::Resume::Best;
  if (evaluates) {
    run.cfg.metrics.dir = "";
  }
  if (run.decode.num_prompts > 0) {  // throws before training
    data.eval->vocabulary();
    examples::require_prompts(*data.eval, run.decode);
  }
  LanguageTrainer trainer(ctx, run.cfg, module, data, adapters_text(run.lora, run.summary));
  if (!run.lora.adapter.empty()) {
    models::require_base(run.lora.adapter, base_identity(trainer));
  }
  if (evaluates) {
    evaluate(trainer, run);
  } else {
    train(trainer, run);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(
      argc, argv, [](ddp::Context& ctx, const ddp::Config& cfg) { run(ctx, cfg); },
      examples::lora_sections());
}
