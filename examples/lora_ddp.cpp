// SPDX-License-Identifier: Apache-2.0
// Trains LoRA adapters on a Qwen2-like chat model, data-parallel, on token files made by
// data/prepare_chat.py. `--help` lists every setting.
//
//   mpirun -n 2 build/examples/lora_ddp --config examples/configs/lora_tiny.yaml
//   srun build/examples/lora_ddp --config examples/configs/lora_qwen2_7b.yaml model.path=FOLDER …
//   … run.mode=evaluate decode.num_prompts=100     (loss, accuracy and answers, without training)
#include <torch/torch.h>

#include <cstdio>
#include <iostream>
#include <memory>
#include <string>

#include "common/decode_prompts.hpp"
#include "common/language_options.hpp"
#include "common/language_sections.hpp"
#include "common/language_trainer.hpp"
#include "common/parameter_hash.hpp"
#include "ddp/ddp.hpp"
#include "models/lora.hpp"
#include "models/qwen2.hpp"

namespace {

using examples::DecodeSettings;
using examples::LanguageTrainer;
using examples::LoraSettings;
using examples::Qwen2Settings;
using examples::RunSettings;

std::string trainable_line(const models::LoraSummary& lora) {
  const auto trainable = static_cast<double>(lora.num_trainable);
  const double all = trainable + static_cast<double>(lora.num_frozen);
  char text[160];
  std::snprintf(text, sizeof text,
                "trainable       %.4g M of %.4g M parameters (%.2f %%), adapters on %zu layers",
                trainable / 1e6, all / 1e6, 100 * trainable / all, lora.layers.size());
  return text;
}

void decode(LanguageTrainer& trainer, const DecodeSettings& settings, const ddp::Config& cfg,
            const ddp::Context& ctx, const char* when) {
  if (settings.num_prompts == 0) {
    return;
  }
  const auto result =
      examples::decode_prompts(trainer.module(), *trainer.data().eval, settings, cfg.amp, ctx);
  if (ctx.is_main()) {
    std::cout << result.shown << "decoded" << when << ": " << result.to_string() << '\n'
              << std::flush;
  }
}

void evaluate(LanguageTrainer& trainer, const DecodeSettings& settings, const ddp::Config& cfg,
              const ddp::Context& ctx) {
  trainer.restore();
  const auto result = trainer.evaluate();
  if (ctx.is_main()) {
    char text[160];
    std::snprintf(text, sizeof text,
                  "\neval loss       %.4f, token accuracy %.2f %%, over %lld targets\n",
                  result.loss, 100 * result.accuracy, static_cast<long long>(result.num_targets));
    std::cout << text << std::flush;
  }
  decode(trainer, settings, cfg, ctx, "");
}

void train(LanguageTrainer& trainer, const DecodeSettings& settings, const ddp::Config& cfg,
           const ddp::Context& ctx, const models::LoraSummary& lora) {
  const auto base = trainer.model().frozen_fingerprint();
  const auto adapters = examples::parameter_hash(trainer.model().named_parameters());
  if (cfg.train.eval_first) {
    decode(trainer, settings, cfg, ctx, " before training");
  }
  const auto summary = trainer.train();
  const bool kept = trainer.model().frozen_fingerprint() == base;
  if (ctx.is_main()) {
    std::cout << examples::language_report(summary, trainer, ctx, cfg) << trainable_line(lora)
              << '\n'
              << "adapters        " << summary.hash << ", "
              << (summary.hash == adapters ? "unchanged" : "changed from " + adapters) << '\n'
              << "base            " << base << ", " << (kept ? "unchanged" : "CHANGED") << '\n'
              << std::flush;
  }
  decode(trainer, settings, cfg, ctx, " after training");
}

void run(ddp::Context& ctx, ddp::Config cfg) {
  const auto run_settings = cfg.section<RunSettings>("run");
  const auto decode_settings = cfg.section<DecodeSettings>("decode");
  const auto lora_settings = cfg.section<LoraSettings>("lora");
  const auto data = examples::open_token_data(cfg.section<ddp::TokenDataOptions>("tokens"));
  auto module = examples::make_qwen2(cfg.section<Qwen2Settings>("model"),
                                     data.train->file().tokenizer().vocab_size, ctx.device());
  const auto lora = examples::add_adapters(*module, lora_settings);
  if (ctx.is_main()) {
    std::cout << data.train->summary() << '\n'
              << data.eval->summary() << '\n'
              << trainable_line(lora) << '\n'
              << std::flush;
  }
  const bool evaluates = run_settings.mode == "evaluate";
  if (evaluates) {
    cfg.metrics.dir = "";
  }
  LanguageTrainer trainer(ctx, cfg, module, data);
  if (evaluates) {
    evaluate(trainer, decode_settings, cfg, ctx);
  } else {
    train(trainer, decode_settings, cfg, ctx, lora);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(
      argc, argv, [](ddp::Context& ctx, const ddp::Config& cfg) { run(ctx, cfg); },
      examples::lora_sections());
}
