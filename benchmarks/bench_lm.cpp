// SPDX-License-Identifier: Apache-2.0
// Training steps of a language model on one resident random batch, measured like
// benchmarks/pytorch_lm.py.
#include <torch/torch.h>

#include <array>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "bench_common.hpp"
#include "ddp/amp/amp.hpp"
#include "ddp/detail/text.hpp"
#include "ddp/ops/language.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "ddp/train/graphed_step.hpp"
#include "exported_models.hpp"
#include "models/bert.hpp"
#include "models/encoder.hpp"
#include "models/gpt2.hpp"
#include "models/lora.hpp"
#include "models/qwen2.hpp"

#if DDP_HAS_CUDA
#include <ATen/cuda/CUDAEvent.h>
#endif

namespace {

constexpr const char* kUsage = R"(usage:
  bench_lm model=qwen2-7b seq_len=4096 batch_size=2           LoRA, one JSON line on rank 0
  bench_lm model=gpt2 seq_len=1024 batch_size=16 dropout=0.1  all parameters
  bench_lm model=encoder seq_len=512 batch_size=8 dtype=fp32  cluster_check's reference encoder
  bench_lm … base_dtype=fp8   LoRA: frozen weights are multiplied in FP8
  bench_lm … accumulate=16    a step accumulates the batch 16 times
  bench_lm … archive=FILE     a model of torch.export, with fuse=true its chains as ddp::ops,
                              with in_graph=true one that takes labels and returns the mean loss
  bench_lm … step=graph       GraphedStep: the whole step captured once, then replayed
  bench_lm … profile=FILE     afterwards a Chrome trace of a few steps, for step_profile.py
  bench_lm … wrap=compare     world 1: wrapped and plain loop in rounds of one process
  bench_lm … gate=FOLDER      each round waits for a file there: see compare.py

param_dtype auto is dtype for a qwen2 model (lora_rank=0 trains all of it), else fp32. If it differs from dtype, the forward runs under autocast. bf16 parameters have fp32 masters. ms is
the median of `rounds` means over `steps` steps. host_ms and host_us are the wall and CPU time in
which the host issues a step into an empty queue. forward, backward (with the reduction) and
optimizer (with the clipping) are medians by device events, 0 in a captured step. peak_mib is
device-wide, read after the warm-up.
)";

using bench::Loop;
using bench::Settings;
using ModelPtr = std::shared_ptr<models::LanguageModel>;

const Settings::Values kDefaults = {
    {"model", "qwen2-7b"},      {"archive", ""},          {"fuse", "false"},
    {"in_graph", "false"},      {"seq_len", "4096"},      {"batch_size", "2"},
    {"dtype", "bf16"},          {"param_dtype", "auto"},  {"vocab_size", "0"},
    {"num_layers", "0"},        {"hidden_size", "0"},     {"num_heads", "0"},
    {"dropout", "0"},           {"attention", "auto"},    {"lora_rank", "64"},
    {"lora_alpha", "128"},      {"lora_dropout", "0.05"}, {"lora_dtype", "fp32"},
    {"base_dtype", "dtype"},    {"accumulate", "1"},      {"checkpoint_every", "0"},
    {"loss_chunk_tokens", "0"}, {"bucket_cap_mb", "25"},  {"comm_hook", "none"},
    {"powersgd_rank", "1"},     {"fp32_grads", "true"},   {"clip", "1"},
    {"optimizer", "adamw"},     {"lr", "1e-4"},           {"weight_decay", "0"},
    {"step", "eager"},          {"steps", "10"},          {"warmup", "3"}};

/// The loss of BERT and of the encoder covers all positions, each with its own id.
bool predicts_own_ids(const Settings& settings) {
  const auto model = settings.text("model");
  return model.starts_with("bert") || model.starts_with("encoder");
}

/// Trained whole, with float32 parameters under autocast.
bool is_pretraining(const Settings& settings) {
  return settings.text("model").starts_with("gpt2") || predicts_own_ids(settings);
}

torch::Dtype torch_dtype(const Settings& settings, const std::string& key) {
  return settings.choice<torch::Dtype>(key,
                                       {{"bf16", torch::kBFloat16}, {"fp32", torch::kFloat32}});
}

torch::Dtype parameter_dtype(const Settings& settings) {
  if (settings.text("param_dtype") != "auto") {
    return torch_dtype(settings, "param_dtype");
  }
  return is_pretraining(settings) ? torch::kFloat32 : torch_dtype(settings, "dtype");
}

/// Enables autocast if the computation's dtype differs from the parameters'.
ddp::AmpOptions autocast_options(const Settings& settings) {
  const bool same = parameter_dtype(settings) == torch_dtype(settings, "dtype");
  return {.dtype = same ? ddp::AmpDtype::Off : bench::amp_dtype(settings, "dtype")};
}

/// Sizes by model name, the same as in benchmarks/pytorch_lm.py.
using Sizes = std::variant<models::Qwen2Options, models::Gpt2Options, models::BertOptions,
                           models::EncoderOptions>;

Sizes named_sizes(const Settings& settings) {
  models::Qwen2Options tiny_qwen2;
  tiny_qwen2.vocab_size = 512;
  tiny_qwen2.hidden_size = 64;
  tiny_qwen2.intermediate_size = 160;
  tiny_qwen2.num_layers = 2;
  tiny_qwen2.num_heads = 4;
  tiny_qwen2.num_kv_heads = 2;
  tiny_qwen2.head_dim = 16;
  models::Gpt2Options tiny_gpt2;
  tiny_gpt2.vocab_size = 512;
  tiny_gpt2.hidden_size = 64;
  tiny_gpt2.num_layers = 2;
  tiny_gpt2.num_heads = 4;
  models::BertOptions tiny_bert;
  tiny_bert.vocab_size = 512;
  tiny_bert.hidden_size = 64;
  tiny_bert.num_layers = 2;
  tiny_bert.num_heads = 4;
  models::EncoderOptions tiny_encoder;
  tiny_encoder.vocab_size = 512;
  tiny_encoder.hidden_size = 64;
  tiny_encoder.num_layers = 2;
  tiny_encoder.num_heads = 4;
  auto sizes = settings.choice<Sizes>("model", {{"qwen2-7b", models::qwen2_7b()},
                                                {"qwen2-1.5b", models::qwen2_1_5b()},
                                                {"qwen2-0.5b", models::qwen2_0_5b()},
                                                {"qwen2-tiny", tiny_qwen2},
                                                {"gpt2", models::Gpt2Options()},
                                                {"gpt2-tiny", tiny_gpt2},
                                                {"bert", models::BertOptions()},
                                                {"bert-tiny", tiny_bert},
                                                {"encoder", models::EncoderOptions()},
                                                {"encoder-tiny", tiny_encoder}});
  std::visit(
      [&](auto& options) {
        const auto override_with = [&](const char* key, int64_t& value) {
          value = settings.number(key) > 0 ? settings.number(key) : value;
        };
        override_with("vocab_size", options.vocab_size);
        override_with("num_layers", options.num_layers);
        override_with("hidden_size", options.hidden_size);
        override_with("num_heads", options.num_heads);
      },
      sizes);
  return sizes;
}

ModelPtr build(const Settings& settings, models::Gpt2Options sizes,
               const torch::TensorOptions& memory) {
  sizes.max_positions = std::max<int64_t>(sizes.max_positions, settings.number("seq_len"));
  sizes.dropout = settings.real("dropout");
  models::Gpt2 model(sizes, memory);
  model->reset_parameters();
  return model.ptr();
}

ModelPtr build(const Settings& settings, models::BertOptions sizes,
               const torch::TensorOptions& memory) {
  sizes.max_positions = std::max<int64_t>(sizes.max_positions, settings.number("seq_len"));
  sizes.hidden_dropout = sizes.attention_dropout = settings.real("dropout");
  models::Bert model(sizes, memory);
  model->reset_parameters();
  return model.ptr();
}

ModelPtr build(const Settings& settings, models::EncoderOptions sizes,
               const torch::TensorOptions& memory) {
  sizes.max_positions = std::max<int64_t>(sizes.max_positions, settings.number("seq_len"));
  return models::Encoder(sizes, memory).ptr();
}

ModelPtr build(const Settings& settings, const models::Qwen2Options& sizes,
               const torch::TensorOptions& memory) {
  models::Qwen2 model(sizes, memory);
  model->reset_parameters();
  if (settings.number("lora_rank") > 0) {
    models::LoraOptions lora;
    lora.rank = settings.number("lora_rank");
    lora.alpha = settings.real("lora_alpha");
    lora.dropout = settings.real("lora_dropout");
    lora.dtype = torch_dtype(settings, "lora_dtype");
    lora.fp8_base = settings.choice<bool>("base_dtype", {{"dtype", false}, {"fp8", true}});
    models::add_lora(*model, lora);
  }
  return model.ptr();
}

ModelPtr make_model(const Settings& settings, at::Device device) {
  if (!settings.text("archive").empty()) {
    return std::make_shared<bench::ExportedLanguageModel>(settings, device);
  }
  const auto memory = torch::TensorOptions().device(device).dtype(parameter_dtype(settings));
  auto model = std::visit([&](const auto& sizes) { return build(settings, sizes, memory); },
                          named_sizes(settings));
  auto& computation = model->computation();
  computation.attention = settings.choice("attention", ddp::ops::attention_backend_names());
  computation.loss_chunk_tokens = settings.number("loss_chunk_tokens");
  computation.checkpoint_every = settings.number("checkpoint_every");
  model->train();
  return model;
}

/// Device times of the parts of each step.
class Phases {
 public:
  static constexpr int kMarks = 4;  // begin, after forward, after backward, after optimizer

  explicit Phases(at::Device device) : device_(device) {}

  void begin_step() {
    steps_.emplace_back();
    next_ = 0;
    mark();
  }
  void mark() {
    auto& moment = steps_.back().at(next_++);
#if DDP_HAS_CUDA
    if (device_.is_cuda()) {
      moment.event = std::make_unique<at::cuda::CUDAEvent>(cudaEventDefault);
      moment.event->record();
      return;
    }
#endif
    moment.time = std::chrono::steady_clock::now();
  }
  /// Median of part `phase` over all steps. The device must be idle.
  double median_ms(int phase) const {
    if (steps_.empty()) {
      return 0;
    }
    std::vector<double> times;
    for (const auto& step : steps_) {
      times.push_back(between(step.at(phase), step.at(phase + 1)));
    }
    return bench::median(std::move(times));
  }

 private:
  struct Moment {
    std::chrono::steady_clock::time_point time;
#if DDP_HAS_CUDA
    std::unique_ptr<at::cuda::CUDAEvent> event;
#endif
  };

  double between(const Moment& from, const Moment& to) const {
#if DDP_HAS_CUDA
    if (device_.is_cuda()) {
      return from.event->elapsed_time(*to.event);
    }
#endif
    return std::chrono::duration<double, std::milli>(to.time - from.time).count();
  }

  at::Device device_;
  std::vector<std::array<Moment, kMarks>> steps_;
  int next_ = 0;
};

/// Runs training steps, wrapped in DistributedDataParallel or not.
class Trainer {
 public:
  Trainer(const Settings& settings, ddp::Context& context, bool wrapped)
      : settings_(settings), phases_(context.device()), amp_(autocast_options(settings)) {
    at::manual_seed(0);
    module_ = make_model(settings, context.device());
    make_batch(context);
    if (wrapped) {
      model_ = std::make_unique<ddp::DistributedDataParallel<ModelPtr>>(
          module_, context.communicator(), bench::ddp_options(settings));
      trained_ = model_->trained_parameters();
    } else {
      for (const auto& item : module_->named_parameters()) {
        if (item.value().requires_grad()) {
          trained_.push_back({item.key(), item.value()});
        }
      }
    }
    ddp::OptimizerOptions rule;
    rule.type = settings.choice<ddp::OptimizerType>(
        "optimizer", {{"adamw", ddp::OptimizerType::AdamW}, {"muon", ddp::OptimizerType::Muon}});
    rule.weight_decay = settings.real("weight_decay");
    optimizer_ = model_ ? ddp::make_optimizer(*model_, rule) : ddp::make_optimizer(trained_, rule);
    if (settings.choice<bool>("step", {{"eager", false}, {"graph", true}})) {
      capture(context);
    }
  }

  void step() {
    const ddp::StepNumbers numbers{.lr = settings_.real("lr"), .step = num_steps_++};
    if (graphed_) {
      last_loss_ = (*graphed_)(batch_, numbers).outputs;
    } else {
      phases_.begin_step();
      last_loss_ = run(batch_, {.lr = numbers.lr}, [this] { phases_.mark(); });
    }
    if (!first_loss_.defined()) {
      first_loss_ = last_loss_.clone();  // a replay overwrites its result
    }
  }

  /// Returns this trainer's settings and figures as the body of a JSON object.
  std::string describe(const Loop& loop, int world_size) const {
    const auto seq_len = settings_.number("seq_len");
    const double tokens = static_cast<double>(settings_.number("batch_size") * seq_len *
                                              settings_.number("accumulate"));
    const double tokens_s = tokens / loop.median_ms() * 1000;
    int64_t num_trained = 0;
    for (const auto& parameter : trained_) {
      num_trained += parameter.tensor.numel();
    }
    ddp::detail::TextStream out;
    out << "\"trained\": " << num_trained << ", \"first_loss\": " << mean_loss(first_loss_)
        << ", \"last_loss\": " << mean_loss(last_loss_) << ", \"ms\": " << loop.median_ms()
        << ", \"host_ms\": " << loop.host_ms << ", \"host_us\": " << loop.host_us
        << ", \"forward_ms\": " << phases_.median_ms(0)
        << ", \"backward_ms\": " << phases_.median_ms(1)
        << ", \"optimizer_ms\": " << phases_.median_ms(2)
        << ", \"tokens_s\": " << tokens_s * world_size
        << ", \"model_tflop_s\": " << tokens_s * module_->flops_per_token(seq_len) / 1e12;
    return out.str();
  }

 private:
  using Batch = std::tuple<torch::Tensor, torch::Tensor>;  // ids and labels
  using Step = std::function<torch::Tensor(const Batch&, const ddp::StepScalars&)>;

  // Draws the same ids as benchmarks/pytorch_lm.py. The last position of a causal model has no
  // label.
  void make_batch(const ddp::Context& context) {
    const auto vocab_size = std::min<int64_t>(module_->vocab_size(), 50257);
    const std::vector<int64_t> shape = {settings_.number("batch_size"),
                                        settings_.number("seq_len")};
    auto generator = at::detail::createCPUGenerator(1 + static_cast<uint64_t>(context.rank()));
    const auto ids = torch::randint(vocab_size, shape, generator, torch::kInt64);
    auto labels = ids.clone();
    if (!predicts_own_ids(settings_)) {
      labels.fill_(ddp::ops::kIgnoreIndex);
      labels.slice(1, 0, shape[1] - 1).copy_(ids.slice(1, 1));
    }
    batch_ = {ids.to(context.device()), labels.to(context.device())};
    num_labels_ =
        static_cast<double>(shape[0] * (shape[1] - (predicts_own_ids(settings_) ? 0 : 1)));
  }

  template <typename Mark>
  torch::Tensor run(const Batch& batch, const ddp::StepScalars& scalars, const Mark& mark) {
    optimizer_->zero_grad();
    const auto& [ids, labels] = batch;
    const models::TokenInput input{.input_ids = ids};
    models::LmOutput output;
    const auto batches = settings_.number("accumulate");
    for (int64_t i = 0; i < batches; ++i) {
      std::optional<ddp::NoSync> no_sync;
      if (model_ && i + 1 < batches) {
        no_sync.emplace(*model_);
      }
      {
        ddp::Autocast autocast(amp_);
        output = model_ ? model_->forward(input, labels) : module_->forward(input, labels);
      }
      if (i == 0) {
        mark();
      }
      if (model_) {
        model_->weighted_backward(output.loss_sum, num_labels_);
      } else {
        (output.loss_sum / (num_labels_ * static_cast<double>(batches))).backward();
      }
    }
    mark();
    if (settings_.real("clip") > 0) {
      scaler_.clip_and_step(*optimizer_, scalars, settings_.real("clip"));
    } else {
      optimizer_->step(scalars);
    }
    mark();
    return output.loss_sum.detach();
  }

  void capture(ddp::Context& context) {
    ddp::GraphedParts parts;
    parts.optimizers = {optimizer_.get()};
    parts.scaler = &scaler_;
    if (model_) {
      parts.models = {model_.get()};
    }
    graphed_ = std::make_unique<ddp::GraphedStep<Batch, torch::Tensor>>(
        context, parts, Step([this](const Batch& batch, const ddp::StepScalars& scalars) {
          return run(batch, scalars, [] {});
        }),
        ddp::GraphedStepOptions{.mode = ddp::CudaGraph::On});
  }

  double mean_loss(const torch::Tensor& loss_sum) const {
    return loss_sum.item<double>() / num_labels_;
  }

  const Settings& settings_;
  Phases phases_;
  ddp::AmpOptions amp_;
  ModelPtr module_;
  std::unique_ptr<ddp::DistributedDataParallel<ModelPtr>> model_;
  ddp::NamedParameters trained_;
  std::unique_ptr<ddp::Optimizer> optimizer_;
  ddp::GradScaler scaler_{{.dtype = ddp::AmpDtype::Off}};  // clips and steps
  Batch batch_;
  std::unique_ptr<ddp::GraphedStep<Batch, torch::Tensor>> graphed_;
  int64_t num_steps_ = 0;
  torch::Tensor first_loss_;
  torch::Tensor last_loss_;
  double num_labels_ = 0;
};

int measure(const Settings& settings) {
  auto context = bench::create_context(settings);
  std::vector<std::unique_ptr<Trainer>> trainers;
  std::vector<Loop> loops;
  for (const bool wrapped : {true, false}) {
    if (settings.text("wrap") != (wrapped ? "plain" : "ddp")) {
      trainers.push_back(std::make_unique<Trainer>(settings, context, wrapped));
      auto* trainer = trainers.back().get();
      loops.push_back({wrapped ? "ddp" : "plain", [trainer] { trainer->step(); }, {}});
      loops.back().is_graph = settings.text("step") == "graph";
    }
  }
  const double peak_mib = bench::measure_rounds(settings, context, loops);
  for (std::size_t i = 0; context.is_main() && i < loops.size(); ++i) {
    std::cout << "{\"impl\": \"libddp-" << loops[i].name << "\", \"model\": \""
              << settings.text("model") << "\", \"world\": " << context.world_size()
              << ", \"seq_len\": " << settings.number("seq_len")
              << ", \"batch_size\": " << settings.number("batch_size") << ", \"dtype\": \""
              << settings.text("dtype") << "\", "
              << trainers[i]->describe(loops[i], context.world_size())
              << ", \"peak_mib\": " << peak_mib << "}" << std::endl;
  }
  loops.clear();
  trainers.clear();
  context.close();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_main(argc, argv, kUsage + Settings::describe(kDefaults),
                         [&] { return measure(Settings("bench_lm", kDefaults, argc, argv)); });
}
