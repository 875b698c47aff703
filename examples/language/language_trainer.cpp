// SPDX-License-Identifier: Apache-2.0
#include "language/language_trainer.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/data_path.hpp"
#include "ddp/detail/text.hpp"

namespace examples {
namespace {

using ddp::concat;

/// Checks that the data fit the model. Generation then chooses among the tokens of the data.
void require_fit(models::LanguageModel& module, const TokenData& data) {
  data.train->require_vocab(module.vocab_size());
  data.eval->require_vocab(module.vocab_size());
  if (const auto longest = data.train->options().max_seq_len; longest > module.max_positions()) {
    throw ddp::SettingsError(concat("tokens.max_seq_len=", longest, " is longer than the model's ",
                                    module.max_positions(), " positions"));
  }
  module.computation().num_tokens = data.train->tokenizer().vocab_size;
}

/// Wraps a model that the data fit.
WrappedLanguageModel wrap(const ddp::Context& ctx, const ddp::Config& cfg,
                          const std::shared_ptr<models::LanguageModel>& module,
                          const TokenData& data) {
  require_fit(*module, data);
  using Model = ddp::DistributedDataParallel<std::shared_ptr<models::LanguageModel>>;
  const auto model = std::make_shared<Model>(module, ctx.communicator(), cfg.ddp);
  return {.model = model,
          .module = module,
          .forward = [model](const models::TokenInput& input,
                             const torch::Tensor& labels) { return model->forward(input, labels); },
          .dtype = module->head_weight().scalar_type()};
}

/// The settings completed for language models.
ddp::Config completed(ddp::Config cfg, const WrappedLanguageModel& wrapped) {
  cfg.metrics.run.sample_unit = "tokens";
  if (cfg.amp.dtype == ddp::AmpDtype::Off && wrapped.dtype == torch::kBFloat16) {
    cfg.metrics.run.precision = "bf16";
  }
  return cfg;
}

/// 1 / (positions in the largest rank's step), rounded to a power of two.
double target_weight(const ddp::Config& cfg, int64_t max_seq_len, const ddp::Context& ctx) {
  const int64_t global = cfg.loader.global_batch_size;
  const int64_t rows =
      global > 0 ? (global + ctx.world_size() - 1) / ctx.world_size() : cfg.loader.batch_size;
  const auto positions = static_cast<double>(rows * max_seq_len * cfg.train.grad_accum_steps);
  return std::exp2(-std::round(std::log2(positions)));
}

// Keys of texts in a checkpoint.
constexpr const char* kAdapters = "adapters";
constexpr const char* kVocabulary = "vocabulary";

std::string vocabulary_text(const TokenData& data) {
  return "the vocabulary " + data.train->tokenizer().identity;
}

bool has_frozen(const torch::nn::Module& module) {
  const auto parameters = module.parameters();
  return std::any_of(parameters.begin(), parameters.end(),
                     [](const torch::Tensor& tensor) { return !tensor.requires_grad(); });
}

/// Detects checkpoints whose weights fit but have another meaning: adapters of another scale,
/// tokens of another vocabulary of the same size.
void require_same_meaning(const ddp::Checkpointer& checkpointer, const std::string& dir,
                          const std::string& adapters, const TokenData& data) {
  const auto require = [&](const char* name, const std::string& now, const char* what) {
    const auto saved = checkpointer.text(name);
    if (!saved.empty() && saved != now) {
      throw ddp::MismatchError(concat("the checkpoint in ", dir, " was trained with ", saved,
                                      ", but this run has ", now, "; fix: use ", what,
                                      ", or another checkpoint.dir"));
    }
  };
  require(kAdapters, adapters, "the same lora.rank, lora.alpha and lora.target_modules");
  require(kVocabulary, vocabulary_text(data), "data prepared with the same tokenizer");
}

/// Restores only the model, from a folder in which a run may still be saving.
int64_t restore_only(ddp::Context& ctx, const ddp::CheckpointOptions& options,
                     ddp::DataParallelModel& model, const std::string& adapters,
                     const TokenData& data) {
  ddp::Checkpointer reader(ctx, reading_options(options), {model});
  const int64_t steps_done = reader.restore();
  require_same_meaning(reader, options.dir, adapters, data);
  return steps_done;
}

std::string eval_report(const LanguageSummary& summary) {
  const auto& test = summary.training.test;
  const auto& before = summary.training.test_before;
  if (test.num_targets == 0) {
    return "";
  }
  auto text = std::string("eval loss       ");
  text += before ? format("%.4f before training, %.4f after", before->loss, test.loss)
                 : format("%.4f", test.loss);
  if (summary.best_steps_done >= 0) {
    text += format(" (best %.4f after step %lld)", summary.best_loss,
                   static_cast<long long>(summary.best_steps_done));
  }
  text += format(", over %lld targets\n", static_cast<long long>(test.num_targets));
  if (std::isnan(test.accuracy)) {
    return text;
  }
  text += "token accuracy  ";
  text += before ? format("%.2f %% before training, %.2f %% after\n", 100 * before->accuracy,
                          100 * test.accuracy)
                 : format("%.2f %%\n", 100 * test.accuracy);
  return text;
}

}  // namespace

TokenData open_token_data(models::TokenDataOptions options) {
  options.path = find_data_path(options.path);
  auto eval_options = options;
  eval_options.num_samples = 0;
  TokenData data{std::make_shared<models::TokenDataset>(options, ddp::Split::Train),
                 std::make_shared<models::TokenDataset>(eval_options, ddp::Split::Test)};
  const auto& train = *data.train;
  const auto& eval = *data.eval;
  if (train.tokenizer().identity != eval.tokenizer().identity) {
    throw ddp::DataError(concat(train.path(), " was made with the vocabulary ",
                                train.tokenizer().identity, " but ", eval.path(), " with ",
                                eval.tokenizer().identity,
                                ", so their ids mean different text; fix: prepare both in one "
                                "call"));
  }
  if (data.eval->statistics().num_targets == 0) {
    throw ddp::DataError(concat(eval.path(),
                                " has no targets within tokens.max_seq_len=", options.max_seq_len,
                                ", so there is nothing to evaluate; fix: a larger value"));
  }
  return data;
}

void load_for_generation(ddp::Context& ctx, const ddp::Config& cfg,
                         const std::shared_ptr<models::LanguageModel>& module,
                         const TokenData& data, const std::string& adapters) {
  if (cfg.checkpoint.dir.empty()) {
    require_fit(*module, data);
    return;
  }
  const auto wrapped = wrap(ctx, cfg, module, data);
  if (has_frozen(*module)) {
    wrapped.model->leave_frozen_out_of_state();
  }
  const auto steps_done = restore_only(ctx, cfg.checkpoint, *wrapped.model, adapters, data);
  ddp::log_info(concat("restored ", cfg.checkpoint.dir, " after step ", steps_done));
}

LanguageTrainer::LanguageTrainer(ddp::Context& ctx, ddp::Config cfg,
                                 std::shared_ptr<models::LanguageModel> module,
                                 const TokenData& data, const std::string& adapters)
    : LanguageTrainer(ctx, cfg, wrap(ctx, cfg, module, data), data, adapters) {}

LanguageTrainer::LanguageTrainer(ddp::Context& ctx, ddp::Config cfg,
                                 const WrappedLanguageModel& wrapped, const TokenData& data,
                                 const std::string& adapters)
    : ctx_(ctx),
      cfg_(completed(std::move(cfg), wrapped)),
      wrapped_(wrapped),
      data_(data),
      optimizer_(ddp::make_optimizer(model(), cfg_.optimizer)),
      scaler_(cfg_.amp),
      sampler_(data.train->size(), ctx.communicator(), cfg_.sampler),
      eval_sampler_(data.eval->size(), ctx.communicator(), ddp::eval_sampler_options(cfg_.sampler)),
      train_loader_(data.train, sampler_, ctx.device(), cfg_.loader,
                    models::TokenCollate(*data.train, data.masking)),
      eval_loader_(data.eval, eval_sampler_, ctx.device(), eval_loader_options(cfg_),
                   models::TokenCollate(*data.eval, data.masking)),
      num_steps_(plan_run(cfg_, ctx, train_loader_.num_batches())),
      lr_schedule_(cfg_.lr_schedule),
      metrics_(ctx, cfg_.metrics),
      task_({.forward = wrapped_.forward,
             .train_loader = train_loader_,
             .eval_loader = eval_loader_,
             .target_weight = target_weight(cfg_, data.train->options().max_seq_len, ctx)}),
      checkpointer_(ctx, cfg_.checkpoint, {model(), optimizer_, scaler_, train_loader_}),
      best_(checkpointer_),
      loop_(task_,
            {.context = ctx,
             .model = model(),
             .module = module(),
             .optimizer = *optimizer_,
             .lr_schedule = lr_schedule_,
             .scaler = scaler_,
             .metrics = metrics_,
             .on_evaluation =
                 [this](int64_t steps_done, const EvalResult& result) {
                   const bool is_best = steps_done > 0 && best_.add(steps_done, result.loss);
                   if (on_evaluation) {
                     on_evaluation(steps_done, result, is_best);
                   }
                 }},
            {.train = cfg_.train,
             .amp = cfg_.amp,
             .num_steps = num_steps_,
             .log_every = cfg_.metrics.log_every,
             .stop_check_seconds = cfg_.checkpoint.stop_check_seconds,
             .keep_best = cfg_.checkpoint.keep_best}),
      adapters_(adapters) {
  if (has_frozen(module())) {
    model().leave_frozen_out_of_state();
  }
}

int64_t LanguageTrainer::restore() {
  if (!first_step_) {
    first_step_ = checkpointer_.restore();
    require_same_meaning(checkpointer_, cfg_.checkpoint.dir, adapters_, data_);
    checkpointer_.set_text(kAdapters, adapters_);
    checkpointer_.set_text(kVocabulary, vocabulary_text(data_));
    best_.restore();
  }
  return *first_step_;
}

int64_t LanguageTrainer::restore_model() {
  return restore_only(ctx_, cfg_.checkpoint, model(), adapters_, data_);
}

LanguageSummary LanguageTrainer::train() {
  restore();
  LanguageSummary summary;
  summary.training = loop_.run(checkpointer_, *first_step_);
  summary.best_steps_done = best_.steps_done();
  summary.best_loss = best_.loss();
  summary.padding_share = padding_share();
  summary.hash = common_parameter_hash(wrapped_.model->trained_parameters(), ctx_.control_plane());
  summary.metrics_folder = metrics_.folder();
  return summary;
}

EvalResult LanguageTrainer::evaluate() {
  return loop_.evaluate();
}

double LanguageTrainer::padding_share() const {
  double tokens = 0, positions = 0;
  for (const auto& counts :
       ctx_.control_plane().all_gather_numbers({task_.num_tokens(), task_.num_positions()})) {
    tokens += static_cast<double>(counts.at(0));
    positions += static_cast<double>(counts.at(1));
  }
  return positions > 0 ? 1 - tokens / positions : 0;
}

std::string language_report(const LanguageSummary& summary, const LanguageTrainer& trainer,
                            const ddp::Context& ctx, const ddp::Config& cfg) {
  const auto& training = summary.training;
  ddp::detail::TextStream out;
  out << '\n';
  out << training.first_lines() << eval_report(summary);
  if (training.samples_per_second() > 0) {
    out << format("tokens/s        %.1f on %d rank(s), without padding (%.2f %% of the batches)\n",
                  training.samples_per_second(), ctx.world_size(), 100 * summary.padding_share);
  }
  const auto& data = trainer.data();
  const bool masked = data.masking != nullptr;
  out << "training data   " << data.train->summary(masked) << '\n'
      << "evaluation data " << data.eval->summary(masked) << '\n'
      << "parameters      " << summary.hash << ", equal on all " << ctx.world_size()
      << " rank(s)\n";
  if (!cfg.checkpoint.dir.empty()) {
    out << "checkpoint      " << cfg.checkpoint.dir << '\n';
  }
  if (!summary.metrics_folder.empty()) {
    out << "CSV and JSONL   " << summary.metrics_folder
        << " (steps.csv, steps.jsonl, evals.csv, evals.jsonl, epochs.csv, epochs.jsonl)\n";
  }
  return out.str();
}

}  // namespace examples
