// SPDX-License-Identifier: Apache-2.0
// Sentences of different lengths: a data set, a batch and a collate function of your own.
//
//   mpirun -n 2 build/examples/recipes/own_data train.epochs=5
#include <torch/torch.h>

#include "ddp/ddp.hpp"

namespace {

struct Sentence {
  torch::Tensor tokens;  // [length]
  int64_t label = 0;
};

// Any class with size() and a get(index) that several threads may call at a time. One that augments
// has get_for_epoch(index, epoch) instead.
struct Sentences {
  static constexpr int64_t kUnknown = 33;
  uint64_t seed = 0;

  int64_t size() const { return 500; }
  Sentence get(int64_t index) const {  // a function of the index: all ranks see the same data
    const auto random = torch::make_generator<at::CPUGeneratorImpl>(index);
    const int64_t label = index % 2, length = 3 + index / 2 % 10;
    return {torch::randint(1 + 16 * label, 17 + 16 * label, {length}, random, torch::kLong), label};
  }
  Sentence get_for_epoch(int64_t index, int64_t epoch) const {  // hides other words in each epoch
    const auto sentence = get(index);
    ddp::SampleRng random(seed, epoch, index);  // the same numbers on any rank and thread
    for (int64_t i = 0; i < sentence.tokens.size(0); ++i) {
      if (random.uniform() < 0.1f) {
        sentence.tokens[i] = kUnknown;
      }
    }
    return sentence;
  }
};

struct SentenceBatch {
  torch::Tensor tokens;  // [N, longest], 0 is padding
  torch::Tensor labels;  // [N]
};
// Names the tensors of a batch: the loader copies these to the GPU.
void for_each_tensor(SentenceBatch& batch, const ddp::TensorVisitor& visit) {
  visit(batch.tokens);
  visit(batch.labels);
}

SentenceBatch collate(const std::vector<Sentence>& sentences) {
  std::vector<torch::Tensor> tokens;
  std::vector<int64_t> labels;
  for (const auto& sentence : sentences) {
    tokens.push_back(sentence.tokens);
    labels.push_back(sentence.label);
  }
  return {torch::nn::utils::rnn::pad_sequence(tokens, /*batch_first=*/true), torch::tensor(labels)};
}

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  torch::nn::Sequential module(
      torch::nn::EmbeddingBag(torch::nn::EmbeddingBagOptions(34, 16).padding_idx(0)),
      torch::nn::Linear(16, 2));
  module->to(ctx.device());
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  auto optimizer = ddp::make_optimizer(model, {.type = ddp::OptimizerType::Adam});
  auto sentences = std::make_shared<Sentences>(Sentences{uint64_t(cfg.context.seed)});
  ddp::DistributedSampler sampler(sentences->size(), ctx.communicator(), cfg.sampler);
  ddp::DataLoader loader(sentences, sampler, ctx.device(), cfg.loader, collate);
  ddp::Metrics metrics(ctx, cfg.metrics);

  const auto num_steps = cfg.train.num_steps(loader.num_batches());
  metrics.begin(0, num_steps);
  for (int64_t step = 0; step < num_steps; ++step) {
    const auto batch = loader.next();
    model.zero_grad();
    const auto logits = model.forward(batch.tokens);
    const auto loss = torch::cross_entropy_loss(logits, batch.labels);
    loss.backward();
    optimizer->step(0.05);
    metrics.log("tokens", batch.tokens.ne(0).sum(), {.reduction = ddp::MetricReduction::Rate});
    metrics.log("longest", batch.tokens.size(1), {.reduction = ddp::MetricReduction::Max});
    metrics.end_step(step, {.loss = loss,
                            .num_samples = batch.labels.size(0),
                            .num_correct = logits.argmax(1).eq(batch.labels).sum()});
  }
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(argc, argv, train);
}
