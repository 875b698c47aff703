// SPDX-License-Identifier: Apache-2.0
// A model with several inputs, one of them optional, and a struct as its output: a conditional
// variational autoencoder, trained with and without the condition.
//
//   mpirun -n 2 build/examples/recipes/inputs_and_outputs ddp.find_unused_parameters=true
#include <torch/torch.h>

#include <optional>

#include "ddp/ddp.hpp"

namespace {

struct Output {
  torch::Tensor reconstruction, mean, log_variance;
};
// Names the tensors of an output. From them find_unused_parameters finds the used parameters.
void for_each_tensor(Output& output, const ddp::TensorVisitor& visit) {
  visit(output.reconstruction);
  visit(output.mean);
  visit(output.log_variance);
}

struct AutoencoderImpl : torch::nn::Module {
  Output forward(const torch::Tensor& x, const std::optional<torch::Tensor>& label) {
    const auto encoded = encoder->forward(x).chunk(2, 1);
    auto latent = encoded[0] + torch::randn_like(encoded[0]) * (encoded[1] / 2).exp();
    if (label) {
      latent = latent + condition->forward(*label);
    }
    return {decoder->forward(latent), encoded[0], encoded[1]};
  }
  torch::nn::Linear encoder = register_module("encoder", torch::nn::Linear(16, 8));
  torch::nn::Embedding condition = register_module("condition", torch::nn::Embedding(10, 4));
  torch::nn::Linear decoder = register_module("decoder", torch::nn::Linear(4, 16));
};
TORCH_MODULE(Autoencoder);

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  Autoencoder module;
  module->to(ctx.device());
  const auto patterns = torch::randn({10, 16}, ctx.device());  // one for each label
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  auto optimizer = ddp::make_optimizer(model, {.type = ddp::OptimizerType::Adam});
  ddp::Metrics metrics(ctx, cfg.metrics);
  metrics.begin(0, cfg.train.max_steps);
  const auto label_options = torch::dtype(torch::kLong).device(ctx.device());
  for (int64_t step = 0; step < cfg.train.max_steps; ++step) {
    const auto label = torch::randint(10, {cfg.train.batch_size}, label_options);
    const auto x = patterns.index_select(0, label);
    // A tenth of the batches lacks the condition, chosen by each rank for itself: there `condition`
    // has no gradient, and find_unused_parameters lets the ranks agree.
    const bool drops = torch::rand({1}).item<double>() < 0.1;
    model.zero_grad();
    const auto output = model.forward(x, drops ? std::nullopt : std::optional(label));
    const auto error = torch::mse_loss(output.reconstruction, x);
    const auto divergence =
        (output.mean.square() + output.log_variance.exp() - 1 - output.log_variance).mean() / 2;
    const auto loss = error + 0.01 * divergence;
    loss.backward();
    optimizer->step(0.01);
    metrics.log("error", error);
    metrics.log("divergence", divergence);
    metrics.log("unconditional", drops, {.reduction = ddp::MetricReduction::Sum});
    metrics.end_step(step, {.loss = loss, .num_samples = x.size(0)});
  }
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(argc, argv, train);
}
