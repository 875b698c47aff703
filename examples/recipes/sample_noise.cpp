// SPDX-License-Identifier: Apache-2.0
// Noise of each sample's own, as diffusion models and denoising autoencoders need it: the same
// numbers on any number of ranks and workers, and after a resume. Here a small diffusion model
// learns two clusters of points.
//
//   mpirun -n 2 build/examples/recipes/sample_noise train.epochs=20
#include <torch/torch.h>

#include <algorithm>
#include <cmath>

#include "ddp/ddp.hpp"

namespace {

struct NoisyPoint {
  torch::Tensor point = {};  // [2], with noise
  torch::Tensor noise = {};  // [2], what the model has to find
  float time = 0;            // share of the noise, in [0, 1)
};

class NoisyPoints {
 public:
  explicit NoisyPoints(uint64_t seed) : seed_(seed) {}

  int64_t size() const { return 512; }
  // Another time and other noise in each epoch: functions of (seed, epoch, index) alone.
  NoisyPoint get_for_epoch(int64_t index, int64_t epoch) const {
    ddp::SampleRng random(seed_, epoch, index);
    NoisyPoint sample{.noise = torch::empty({2}), .time = random.uniform()};
    auto* const noise = sample.noise.mutable_data_ptr<float>();
    std::generate(noise, noise + 2, [&] { return random.normal(); });
    const auto clean = torch::full({2}, index % 2 == 0 ? 2.0 : -2.0);
    sample.point = std::sqrt(1 - sample.time) * clean + std::sqrt(sample.time) * sample.noise;
    return sample;
  }

 private:
  uint64_t seed_;
};

struct NoisyBatch {
  torch::Tensor inputs;  // [N, 3]: point and time
  torch::Tensor noise;   // [N, 2]
};
void for_each_tensor(NoisyBatch& batch, const ddp::TensorVisitor& visit) {
  visit(batch.inputs);
  visit(batch.noise);
}

NoisyBatch collate(const std::vector<NoisyPoint>& samples) {
  std::vector<torch::Tensor> inputs, noise;
  for (const auto& sample : samples) {
    inputs.push_back(torch::cat({sample.point, torch::full({1}, sample.time)}));
    noise.push_back(sample.noise);
  }
  return {torch::stack(inputs), torch::stack(noise)};
}

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  torch::nn::Sequential module(torch::nn::Linear(3, 64), torch::nn::SiLU(),
                               torch::nn::Linear(64, 2));
  module->to(ctx.device());
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  auto optimizer = ddp::make_optimizer(model, {.type = ddp::OptimizerType::Adam});
  auto points = std::make_shared<NoisyPoints>(cfg.context.seed);
  ddp::DistributedSampler sampler(points->size(), ctx.communicator(), cfg.sampler);
  ddp::DataLoader loader(points, sampler, ctx.device(), cfg.loader, collate);
  ddp::Metrics metrics(ctx, cfg.metrics);

  const auto num_steps = cfg.train.num_steps(loader.num_batches());
  metrics.begin(0, num_steps, loader.num_batches());
  for (int64_t step = 0; step < num_steps; ++step) {
    const auto batch = loader.next();
    model.zero_grad();
    const auto loss = torch::mse_loss(model.forward(batch.inputs), batch.noise);
    loss.backward();
    optimizer->step(0.01);
    metrics.end_step(step, {.loss = loss, .num_samples = batch.noise.size(0)});
  }
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(argc, argv, train);
}
