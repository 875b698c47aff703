// SPDX-License-Identifier: Apache-2.0
// A causal language model, its data and all that trains it, from the settings: what lora_ddp and
// gpt2_ddp share.
#pragma once

#include <functional>
#include <memory>
#include <optional>
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
  /// keep a fingerprint alone, and `adapters`, what the weights alone do not tell of them (their
  /// scale): a resume with another text is refused. Throws DataError where the data has tokens that
  /// the model lacks, SettingsError for rows longer than the model's positions. Collective.
  LanguageTrainer(ddp::Context& ctx, ddp::Config cfg, std::shared_ptr<models::CausalLm> module,
                  const TokenData& data, const std::string& adapters = "");

  ddp::DataParallelModel& model() { return model_; }
  models::CausalLm& module() { return *module_; }
  const TokenData& data() const { return data_; }
  ddp::Checkpointer& checkpointer() { return checkpointer_; }

  /// Called on all ranks after each evaluation of train(); `is_best`: the loss is below all before.
  std::function<void(int64_t steps_done, const EvalResult&, bool is_best)> on_evaluation;

  /// Goes on from the newest checkpoint, trains to the end. Collective.
  LanguageSummary train();
  /// The model as it is. Collective.
  EvalResult evaluate();
  /// Everything as the newest checkpoint has it, for train(); the steps done. Once is enough.
  int64_t restore();
  /// The model alone, out of the newest checkpoint of a run that may still be training, whose
  /// folder is left as it is; the steps done. Throws ReadError where there is none.
  int64_t restore_model();

 private:
  double padding_share() const;
  void require_same_meaning(const ddp::Checkpointer& checkpointer) const;

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
  std::string adapters_;
  std::optional<int64_t> first_step_{};  ///< after restore()
};

/// The lines of a summary that both programs print.
std::string language_report(const LanguageSummary& summary, const LanguageTrainer& trainer,
                            const ddp::Context& ctx, const ddp::Config& cfg);

}  // namespace examples
