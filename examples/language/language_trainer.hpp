// SPDX-License-Identifier: Apache-2.0
// Builds the data and the training of a language model from the settings, for lora_ddp, gpt2_ddp,
// bert_ddp and exported_ddp.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "common/evaluation.hpp"
#include "common/run_plan.hpp"
#include "common/training_loop.hpp"
#include "common/training_report.hpp"
#include "ddp/ddp.hpp"
#include "language/language_task.hpp"
#include "models/language_model.hpp"
#include "models/tokens/token_dataset.hpp"
#include "models/tokens/token_masking.hpp"

namespace examples {

struct TokenData {
  std::shared_ptr<models::TokenDataset> train;
  std::shared_ptr<models::TokenDataset> eval;
  /// Masks both splits; nullptr: the targets are the next tokens.
  std::shared_ptr<const models::TokenMasking> masking = nullptr;
};

/// Opens both splits of the folder in `options`, independent of the working folder. Throws
/// DataError if the splits have different vocabularies or the evaluation split holds no target.
TokenData open_token_data(models::TokenDataOptions options);

/// A wrapped model of token files. `model` wraps `module`.
struct WrappedLanguageModel {
  std::shared_ptr<ddp::DataParallelModel> model;
  std::shared_ptr<torch::nn::Module> module;
  /// LanguageParts::forward
  std::function<models::LmOutput(const models::TokenInput&, const at::Tensor& labels)> forward;
  c10::ScalarType dtype = c10::ScalarType::Float;  ///< of the parameters
};

struct LanguageSummary {
  TrainingSummary training;
  int64_t best_steps_done = -1;  ///< of the evaluation with the smallest loss; -1: none
  double best_loss = 0;
  double padding_share = 0;  ///< share of padding in this run's training batches, all ranks
  std::string hash;          ///< hash of the trained parameters
  std::string metrics_folder;
};

/// Prepares `module` for a program that only generates: it has no gradients, optimizer or loaders
/// afterwards. With checkpoint.dir it restores the newest checkpoint (with checkpoint.resume=best:
/// the best), else it leaves the weights as they are. Throws as LanguageTrainer's constructor and
/// restore_model() do. Collective.
void load_for_generation(ddp::Context& ctx, const ddp::Config& cfg,
                         const std::shared_ptr<models::LanguageModel>& module,
                         const TokenData& data, const std::string& adapters = "");

class LanguageTrainer {
 public:
  /// `module` is on the device and has its adapters, if any. Checkpoints keep only a fingerprint of
  /// its frozen parameters. They also keep `adapters`, a description of settings that the weights
  /// do not show (their scale); a resume with another description is refused. Throws DataError if
  /// the data has tokens that the model lacks, SettingsError if rows are longer than the model's
  /// positions. Collective.
  LanguageTrainer(ddp::Context& ctx, ddp::Config cfg, std::shared_ptr<models::LanguageModel> module,
                  const TokenData& data, const std::string& adapters = "");
  /// The same for a model of any kind, which checks the data itself.
  LanguageTrainer(ddp::Context& ctx, ddp::Config cfg, const WrappedLanguageModel& wrapped,
                  const TokenData& data, const std::string& adapters = "");

  ddp::DataParallelModel& model() { return *wrapped_.model; }
  torch::nn::Module& module() { return *wrapped_.module; }
  const TokenData& data() const { return data_; }
  ddp::Checkpointer& checkpointer() { return checkpointer_; }

  /// Called on all ranks after each evaluation of train(). `is_best`: the loss is below all earlier
  /// ones.
  std::function<void(int64_t steps_done, const EvalResult&, bool is_best)> on_evaluation;

  /// Resumes from the newest checkpoint and trains to the end. Collective.
  LanguageSummary train();
  /// Evaluates the current model. Collective.
  EvalResult evaluate();
  /// Restores everything from the newest checkpoint, for train(); returns the steps done. Call it
  /// once.
  int64_t restore();
  /// Restores the model alone from the newest checkpoint (with checkpoint.resume=best: the best) of
  /// a run that may still be training; its folder is not changed. Returns the steps done. Throws
  /// ReadError if there is no checkpoint.
  int64_t restore_model();

 private:
  double padding_share() const;

  ddp::Context& ctx_;
  ddp::Config cfg_;
  WrappedLanguageModel wrapped_;
  TokenData data_;
  std::unique_ptr<ddp::Optimizer> optimizer_;
  ddp::GradScaler scaler_;
  ddp::DistributedSampler sampler_, eval_sampler_;
  TokenLoader train_loader_, eval_loader_;
  int64_t num_steps_;
  ddp::LrSchedule lr_schedule_;
  ddp::Metrics metrics_;
  LanguageTask task_;
  ddp::Checkpointer checkpointer_;
  BestEvaluation best_;
  TrainingLoop<LanguageBatch> loop_;
  std::string adapters_;
  std::optional<int64_t> first_step_{};  ///< set by restore()
};

/// The summary lines that both programs print.
std::string language_report(const LanguageSummary& summary, const LanguageTrainer& trainer,
                            const ddp::Context& ctx, const ddp::Config& cfg);

}  // namespace examples
