// SPDX-License-Identifier: Apache-2.0
// Runs libddp for lm_interchange.py; every result is a file that Python reads. Any number of these
// commands, with "--" between them:
//
//   lm_interchange_tool logits MODEL BATCH OUT [ADAPTER]   logits of the batch's input_ids
//   lm_interchange_tool train MODEL BATCH ADAPTER STEPS    trains a new adapter, saves it
//   lm_interchange_tool save MODEL OUT                     the model again, in shards
#include <torch/torch.h>

#include <cstdio>
#include <stdexcept>

#include "models/bert.hpp"
#include "models/lora.hpp"
#include "models/pretrained/hf_weights.hpp"
#include "models/pretrained/peft_adapter.hpp"

namespace {

using Arguments = std::vector<std::string>;

std::shared_ptr<models::LanguageModel> load(const std::string& folder) {
  auto model = models::make_language_model(models::read_hf_config(folder), at::kFloat);
  models::load_pretrained(*model, folder);
  model->eval();
  return model;
}

at::Tensor logits_of(models::LanguageModel& model, const models::TokenInput& input) {
  if (auto* bert = dynamic_cast<models::BertImpl*>(&model)) {
    return bert->logits(bert->hidden_states(input));
  }
  auto& causal = dynamic_cast<models::CausalLm&>(model);
  return causal.logits(causal.hidden_states(input));
}

void logits(const Arguments& arguments) {
  const auto model = load(arguments.at(1));
  if (arguments.size() > 4) {
    models::add_adapter(*model, arguments[4]);
  }
  const auto batch = ddp::load_safetensors(arguments.at(2)).tensors;
  const torch::NoGradGuard no_grad;
  ddp::save_safetensors(arguments.at(3),
                        {{"logits", logits_of(*model, models::TokenInput{batch.at("input_ids")})}});
}

void train(const Arguments& arguments) {
  const auto model = load(arguments.at(1));
  torch::manual_seed(4);
  const models::LoraOptions options{.rank = 3, .alpha = 9, .dropout = 0};
  const auto summary = models::add_lora(*model, options);
  std::vector<at::Tensor> trained;
  for (const auto& parameter : model->parameters()) {
    if (parameter.requires_grad()) {
      trained.push_back(parameter);
    }
  }
  torch::optim::AdamW optimizer(trained, torch::optim::AdamWOptions(0.01));
  const auto batch = ddp::load_safetensors(arguments.at(2)).tensors;
  const auto ids = batch.at("input_ids");
  const int64_t count = ids.size(1) - 1;
  const models::TokenInput input{ids.narrow(1, 0, count).contiguous()};
  const auto labels = ids.narrow(1, 1, count).contiguous();
  double first = 0, last = 0;
  for (int step = 0; step < std::stoi(arguments.at(4)); ++step) {
    optimizer.zero_grad();
    const auto loss = model->forward(input, labels).loss_sum / labels.numel();
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    first = step == 0 ? last : first;
  }
  std::printf("trained %lld values of %zu layers: loss %.4f -> %.4f\n",
              static_cast<long long>(summary.num_trainable), summary.layers.size(), first, last);
  if (!(last < first)) {
    throw std::runtime_error("the loss did not fall");
  }
  models::save_adapter(*model, arguments.at(3), arguments.at(1));
}

void save(const Arguments& arguments) {
  const auto config = models::read_hf_config(arguments.at(1));
  models::save_pretrained(*load(arguments.at(1)), config, arguments.at(2),
                          {.max_shard_bytes = 20'000});
}

void run(const Arguments& arguments) {
  const std::string command = arguments.at(0);
  if (command == "logits") {
    logits(arguments);
  } else if (command == "train") {
    train(arguments);
  } else {
    save(arguments);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    std::vector<Arguments> commands(1);
    for (int i = 1; i < argc; ++i) {
      if (const std::string word = argv[i]; word == "--") {
        commands.emplace_back();
      } else {
        commands.back().push_back(word);
      }
    }
    for (const auto& arguments : commands) {
      run(arguments);
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
