// SPDX-License-Identifier: Apache-2.0
// Trains BERT on masked tokens, data-parallel, from random weights or a Hugging Face folder, on
// token files made by data/prepare_text.py --tokenizer wordpiece. `--help` lists options and
// settings.
//
//   mpirun -n 2 build/examples/bert_ddp --config examples/configs/bert_sample.yaml
//   torchrun --no-python --nproc-per-node=8 build/examples/bert_ddp
//       --config examples/configs/bert_base.yaml tokens.path=FOLDER
#include <torch/torch.h>

#include <iostream>
#include <memory>

#include "ddp/ddp.hpp"
#include "language/base_tokenizer.hpp"
#include "language/language_options.hpp"
#include "language/language_sections.hpp"
#include "language/language_trainer.hpp"
#include "models/tokens/token_masking.hpp"

namespace {

void run(ddp::Context& ctx, const ddp::Config& cfg) {
  const auto masking = cfg.section<models::MaskingOptions>("masking");
  auto data = examples::open_token_data(cfg.section<examples::MaskedTextOptions>("tokens"));
  data.masking = std::make_shared<models::TokenMasking>(data.train->vocabulary(), masking);
  const auto model = cfg.section<examples::BertSettings>("model");
  if (ctx.is_main()) {
    examples::require_base_tokenizer(*data.train, model.common);
  }
  const auto module = examples::make_bert(model, data.train->tokenizer().vocab_size, ctx);
  module->computation().head_share = masking.full_head ? 1 : masking.masked_share;
  int64_t num_parameters = 0;
  for (const auto& parameter : module->parameters()) {
    num_parameters += parameter.numel();
  }
  if (ctx.is_main()) {
    std::cout << data.train->summary(/*masked=*/true) << '\n'
              << data.eval->summary(/*masked=*/true) << '\n'
              << num_parameters << " parameters\n"
              << std::flush;
  }
  examples::LanguageTrainer trainer(ctx, cfg, module, data);
  const auto summary = trainer.train();
  if (ctx.is_main()) {
    std::cout << examples::language_report(summary, trainer, ctx, cfg) << std::flush;
  }
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(
      argc, argv, [](ddp::Context& ctx, const ddp::Config& cfg) { run(ctx, cfg); },
      examples::bert_sections());
}
