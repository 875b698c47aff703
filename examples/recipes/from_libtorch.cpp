// SPDX-License-Identifier: Apache-2.0
// A plain LibTorch program in the shape of PyTorch's cpp/mnist, made data-parallel. A comment marks
// each line that differs. The loader of torch::data and the optimizer of torch::optim stay.
//
//   mpirun -n 2 build/examples/recipes/from_libtorch
#include <torch/torch.h>

#include "ddp/ddp.hpp"  // new

namespace {

constexpr int64_t kBatchSize = 20;  // of each rank
constexpr int64_t kNumEpochs = 2;

// Ten patterns of 8 x 8 pixels with noise. Your own torch::data data set goes here.
struct Digits : torch::data::datasets::Dataset<Digits> {
  explicit Digits(int64_t size) : size_(size), patterns_(torch::randn({10, 1, 8, 8})) {}
  torch::data::Example<> get(size_t index) override {
    const auto label = static_cast<int64_t>(index) % 10;
    return {patterns_[label] + 0.5 * torch::randn({1, 8, 8}), torch::tensor(label)};
  }
  torch::optional<size_t> size() const override { return size_; }

  int64_t size_;
  torch::Tensor patterns_;
};

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(torch::max_pool2d(conv->forward(x), 2));
    return torch::log_softmax(fc->forward(x.flatten(1)), /*dim=*/1);
  }
  torch::nn::Conv2d conv = register_module("conv", torch::nn::Conv2d(1, 8, 3));
  torch::nn::Linear fc = register_module("fc", torch::nn::Linear(8 * 3 * 3, 10));
};
TORCH_MODULE(Net);

void train(ddp::Context& ctx, const ddp::Config& cfg) {  // was: int main()
  const auto device = ctx.device();                      // was: torch::cuda::is_available() ? …
  auto dataset = Digits(1000);
  ddp::DistributedSampler sampler(1000, ctx.communicator(), cfg.sampler);  // was: RandomSampler
  auto loader = torch::data::make_data_loader(dataset.map(torch::data::transforms::Stack<>()),
                                              sampler, kBatchSize);
  Net net;
  net->to(device);
  ddp::DistributedDataParallel model(net, ctx.communicator(), cfg.ddp);  // new
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.5));
  ddp::Metrics metrics(ctx, cfg.metrics);                                          // new
  const auto num_batches = (sampler.num_samples() + kBatchSize - 1) / kBatchSize;  // new: per epoch
  metrics.begin(0, kNumEpochs * num_batches);                                      // new
  int64_t step = 0;                                                                // new
  for (int64_t epoch = 0; epoch < kNumEpochs; ++epoch) {
    for (auto& batch : *loader) {
      const auto data = batch.data.to(device), target = batch.target.to(device);
      optimizer.zero_grad();
      const auto output = model.forward(data);  // was: net->forward(data)
      const auto loss = torch::nll_loss(output, target);
      loss.backward();
      optimizer.step();
      const auto num_correct = output.argmax(1).eq(target).sum();
      metrics.end_step(step++, {.loss = loss,  // was: std::printf
                                .num_samples = data.size(0),
                                .num_correct = num_correct});
    }
  }
  if (ctx.is_main()) {  // new: one rank writes the file
    torch::save(net, "net.pt");
  }
}

}  // namespace

int main(int argc, char** argv) {  // new
  return ddp::run(argc, argv, train, ddp::only_sections({"sampler", "ddp", "metrics"}));
}
