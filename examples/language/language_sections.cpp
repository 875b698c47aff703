// SPDX-License-Identifier: Apache-2.0
#include "language/language_sections.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "ddp/train/config.hpp"
#include "language/decode_prompts.hpp"
#include "language/sample_text.hpp"
#include "models/tokens/token_masking.hpp"

namespace examples {
namespace {

constexpr const char* kTokens = "Token files, and how documents become rows.";
constexpr const char* kModel = "The transformer: sizes, first weights, dtype, kernels.";

/// Passes on all fields except the given ones.
class FieldsWithout final : public ddp::FieldVisitor {
 public:
  FieldsWithout(std::vector<std::string> names, ddp::FieldVisitor& visitor)
      : names_(std::move(names)), visitor_(visitor) {}
  void field(const ddp::Field& info, bool& value) override { pass(info, value); }
  void field(const ddp::Field& info, int64_t& value) override { pass(info, value); }
  void field(const ddp::Field& info, double& value) override { pass(info, value); }
  void field(const ddp::Field& info, ddp::NumberOrAuto& value) override { pass(info, value); }
  void field(const ddp::Field& info, std::string& value) override { pass(info, value); }
  void field(const ddp::Field& info, std::vector<int64_t>& value) override { pass(info, value); }
  void field(const ddp::Field& info, std::vector<double>& value) override { pass(info, value); }
  void field(const ddp::Field& info, std::vector<std::string>& value) override {
    pass(info, value);
  }

 protected:
  void enter_section(const std::string& name) override {
    throw std::logic_error("options inside options: " + name);
  }
  void leave_section() override {}

 private:
  template <typename T>
  void pass(const ddp::Field& info, T& value) {
    if (std::find(names_.begin(), names_.end(), info.name) == names_.end()) {
      visitor_.field(info, value);
    }
  }
  std::vector<std::string> names_;
  ddp::FieldVisitor& visitor_;
};

/// A library section with other defaults.
template <typename T>
ddp::Section with_defaults(std::string name, T options) {
  return {std::move(name),
          [options](ddp::FieldVisitor& visitor) mutable { describe_fields(options, visitor); }};
}

ddp::Section train_section(ddp::TrainOptions options) {
  options.max_grad_norm = 1;
  options.eval_first = true;
  return {"train", [options](ddp::FieldVisitor& visitor) mutable {
            // Without those for classes of images.
            FieldsWithout used({"label_smoothing", "mixup", "cutmix"}, visitor);
            describe_fields(options, used);
          }};
}

/// Adds the library sections that both programs use; `batch_size` counts rows.
void add_library_sections(std::vector<ddp::Section>& sections, int64_t max_steps,
                          int64_t batch_size, const ddp::LrScheduleOptions& lr_schedule) {
  sections.push_back({"data", [](ddp::FieldVisitor&) {}});  // for images; texts use section tokens
  sections.push_back(train_section({.max_steps = max_steps, .batch_size = batch_size}));
  sections.push_back(with_defaults<ddp::LoaderOptions>("loader", {.batch_size = batch_size}));
  sections.push_back(
      with_defaults<ddp::OptimizerOptions>("optimizer", {.type = ddp::OptimizerType::AdamW}));
  sections.push_back(with_defaults("lr_schedule", lr_schedule));
  // All modes take the file of a training run, but only training takes all sections.
  sections.push_back(ddp::uses({"amp", "checkpoint", "ddp", "metrics", "sampler"}));
}

}  // namespace

StreamOptions::StreamOptions() {
  path = "data/text-sample";
  layout = models::TokenLayout::Stream;
  max_seq_len = 64;
}

MaskedTextOptions::MaskedTextOptions() {
  path = "data/masked-text-sample";
  layout = models::TokenLayout::Pack;
  max_seq_len = 64;
}

ChatOptions::ChatOptions() {
  max_seq_len = 512;
}

std::vector<ddp::Section> lora_sections() {
  std::vector<ddp::Section> sections = {
      ddp::declare_section<RunSettings>("run", "Train, or only evaluate, or chat."),
      ddp::declare_section<ChatOptions>("tokens", kTokens),
      ddp::declare_section<Qwen2Settings>("model", kModel),
      ddp::declare_section<LoraSettings>("lora", "The adapters, and the folder they are saved in."),
      ddp::declare_section<DecodeSettings>("decode", "Answers that are decoded at evaluations.")};
  add_library_sections(sections, 120, 2,
                       {.type = ddp::LrScheduleType::Cosine, .lr = 1e-3, .warmup_steps = 10});
  return sections;
}

std::vector<ddp::Section> gpt2_sections() {
  std::vector<ddp::Section> sections = {
      ddp::declare_section<Gpt2RunSettings>("run", "Train, or continue prompts."),
      ddp::declare_section<StreamOptions>("tokens", kTokens),
      ddp::declare_section<Gpt2Settings>("model", kModel),
      ddp::declare_section<SampleSettings>("sample", "Text that is generated at the end.")};
  add_library_sections(sections, 300, 16,
                       {.type = ddp::LrScheduleType::Cosine, .lr = 3e-3, .warmup_steps = 20});
  return sections;
}

std::vector<ddp::Section> bert_sections() {
  std::vector<ddp::Section> sections = {
      ddp::declare_section<MaskedTextOptions>("tokens", kTokens),
      ddp::declare_section<models::MaskingOptions>("masking", "Which tokens are masked."),
      ddp::declare_section<BertSettings>("model", kModel)};
  add_library_sections(sections, 400, 16,
                       {.type = ddp::LrScheduleType::Linear, .lr = 3e-3, .warmup_steps = 20});
  return sections;
}

}  // namespace examples
