// SPDX-License-Identifier: Apache-2.0
// Trains GPT-2 from random weights, data-parallel, on token files made by data/prepare_text.py. At
// the end it generates sample text. `--help` lists options and settings.
//
//   mpirun -n 2 build/examples/gpt2_ddp --config examples/configs/gpt2_sample.yaml
//   torchrun --no-python --nproc-per-node=8 build/examples/gpt2_ddp
//       --config examples/configs/gpt2_124m.yaml tokens.path=FOLDER
//   tools/chat.py --config examples/configs/gpt2_sample.yaml checkpoint.dir=FOLDER
//
// The last command does not train. It continues prompts with the newest checkpoint.
#include <torch/torch.h>

#include <iostream>
#include <memory>
#include <string>

#include "common/run_plan.hpp"
#include "ddp/ddp.hpp"
#include "ddp/detail/text.hpp"
#include "language/base_tokenizer.hpp"
#include "language/language_options.hpp"
#include "language/language_sections.hpp"
#include "language/language_trainer.hpp"
#include "language/prompt_loop.hpp"
#include "language/sample_text.hpp"

namespace {

using examples::Gpt2Settings;
using examples::LanguageTrainer;
using examples::SampleSettings;

/// Rank 0 prints; the others wait for it.
void print_samples(models::CausalLm& model, const models::Vocabulary& vocabulary,
                   const SampleSettings& settings, const ddp::Config& cfg,
                   const ddp::Context& ctx) {
  ddp::StopPoll poll(ctx, cfg.checkpoint.stop_check_seconds, "samples");
  const auto stops = [&] { return poll.should_stop(); };
  for (int64_t i = 0; ctx.is_main() && i < settings.num_samples && !poll.should_stop(); ++i) {
    std::cout << "--- sample " << i + 1 << '\n'
              << ddp::detail::printable(
                     examples::sample_text(model, vocabulary, settings, cfg.amp, i, stops))
              << '\n'
              << std::flush;
  }
  if (poll.finish()) {
    examples::stop_beside_training(cfg, poll.stop_reason(), "generating samples");
  }
}

void run(ddp::Context& ctx, const ddp::Config& cfg) {
  const auto sample = cfg.section<SampleSettings>("sample");
  const bool continues = cfg.section<examples::Gpt2RunSettings>("run").mode == "prompt";
  const auto model = cfg.section<Gpt2Settings>("model");
  if (continues) {
    examples::require_prompt_settings(ctx, cfg, model.common);
  }
  const auto data = examples::open_token_data(cfg.section<examples::StreamOptions>("tokens"));
  if (ctx.is_main()) {
    examples::require_base_tokenizer(*data.train, model.common);
  }
  auto module = examples::make_gpt2(model, data.train->tokenizer().vocab_size, ctx);
  if (continues) {
    examples::load_for_generation(ctx, cfg, module, data);
    examples::answer_prompts(*module, *data.train, model.common,
                             {.max_new_tokens = sample.max_new_tokens,
                              .temperature = sample.temperature,
                              .top_k = sample.top_k,
                              .seed = sample.seed},
                             cfg.amp);
    return;
  }
  if (sample.num_samples > 0) {  // reports an invalid prompt before training
    examples::prompt_ids(data.train->vocabulary(), sample, module->max_positions());
  }
  int64_t num_parameters = 0;
  for (const auto& parameter : module->parameters()) {
    num_parameters += parameter.numel();
  }
  if (ctx.is_main()) {
    std::cout << data.train->summary() << '\n'
              << data.eval->summary() << '\n'
              << num_parameters << " parameters\n"
              << std::flush;
  }
  LanguageTrainer trainer(ctx, cfg, module, data);
  const auto summary = trainer.train();
  if (ctx.is_main()) {
    std::cout << examples::language_report(summary, trainer, ctx, cfg) << std::flush;
  }
  if (sample.num_samples > 0) {
    print_samples(*module, data.train->vocabulary(), sample, cfg, ctx);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(
      argc, argv, [](ddp::Context& ctx, const ddp::Config& cfg) { run(ctx, cfg); },
      examples::gpt2_sections());
}
