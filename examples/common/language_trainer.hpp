// SPDX-License-Identifier: Apache-2.0
// A causal language model, its data and all that trains it, from the settings: what lora_ddp and
// gpt2_ddp share.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "common/best_evaluation.hpp"
#include "common/language_task.hpp"
#include "common/run_plan.hpp"
#include "common/training_loop.hpp"
#include "ddp/data/token_dataset.hpp"
#include "ddp/ddp.hpp"
#include "models/causal_lm.hpp"

namespace examples {

struct TokenData {
  std::shared_ptr<ddp::TokenDataset> train;
  std::shared_ptr<ddp::TokenDataset> eval;
};

/// Both splits of the folder that `options` name, found wherever the program was started. Throws
/// DataError where they were made with different vocabularies, or where the evaluation split holds
/// no target.
TokenData open_token_data(ddp::TokenDataOptions options);

struct LanguageSummary {
  TrainingSummary training;
  int64_t best_steps_done = -1;  ///< of the evaluation with the smallest loss; -1: none
  double best_loss = 0;
  double padding_share = 0;  ///< of the places in this run's training batches, all ranks
  std::string hash;          ///< of the trained parameters
  std::string metrics_folder;
};

class LanguageTrainer {
 public:
  /// `module` is on the device and has its adapters, if any; of its frozen parameters checkpoints
  /// keep a fingerprint alone. Throws DataError where the data has tokens that the model lacks,
  /// SettingsError for rows longer than the model's positions. Collective.
  LanguageTrainer(ddp::Context& ctx, ddp::Config cfg, std::shared_ptr<models::CausalLm> module,
                  const TokenData& data);

  ddp::DataParallelModel& model() { return model_; }
  models::CausalLm& module() { return *module_; }
  const TokenData& data() const { return data_; }

  /// Called on all ranks after each evaluation of train(); `is_best`: the loss is below all before.
  std::function<void(int64_t steps_done, const EvalResult&, bool is_best)> on_evaluation;

  /// Goes on from the newest checkpoint, trains to the end. Collective.
  LanguageSummary train();
  /// The model as it is, or as the newest checkpoint has it. Collective.
  EvalResult evaluate();
  void restore();

 private:
  double padding_share() const;

  ddp::Context& ctx_;
  ddp::Config cfg_;
  std::shared_ptr<models::CausalLm> module_;
  TokenData data_;
  ddp::DistributedDataParallel<std::shared_ptr<models::CausalLm>> model_;
  ddp::AnyOptimizer optimizer_;
  ddp::GradScaler scaler_;
  ddp::DistributedSampler sampler_, eval_sampler_;
  TokenLoader train_loader_, eval_loader_;
  RunPlan plan_;
  ddp::LrSchedule lr_schedule_;
  ddp::Metrics metrics_;
  LanguageTask task_;
  ddp::Checkpointer checkpointer_;
  BestEvaluation best_;
  TrainingLoop loop_;
  int64_t first_step_ = 0;
};

/// The lines of a summary that both programs print.
std::string language_report(const LanguageSummary& summary, const LanguageTrainer& trainer,
                            const ddp::Context& ctx, const ddp::Config& cfg);

}  // namespace examples
