// SPDX-License-Identifier: Apache-2.0
// A recommender: tables of users and items whose gradients are sparse. A step reads, sends and
// writes only the rows of its batch. Here the ratings come from hidden tastes.
//
//   mpirun -n 2 build/examples/recipes/recommender train.epochs=20
#include <torch/torch.h>

#include "ddp/ddp.hpp"

namespace {

struct TableSettings {
  int64_t users = 500;
  int64_t items = 200;
  int64_t dim = 16;
};
void describe_fields(TableSettings& settings, ddp::FieldVisitor& visitor) {
  visitor.field({.name = "users", .doc = "Rows of the table of users.", .min = 1}, settings.users);
  visitor.field({.name = "items", .doc = "Rows of the table of items.", .min = 1}, settings.items);
  visitor.field({.name = "dim", .doc = "Columns of both tables.", .min = 1}, settings.dim);
}
struct DdpDefaults : ddp::DdpOptions {
  DdpDefaults() { sparse = ddp::SparseGradients::Gather; }
};
struct OptimizerDefaults : ddp::OptimizerOptions {
  OptimizerDefaults() { type = ddp::OptimizerType::Adam; }
};
struct LrScheduleDefaults : ddp::LrScheduleOptions {
  LrScheduleDefaults() { lr = 0.5; }
};

// 8,000 ratings: a user, an item, and how well their hidden tastes agree.
std::shared_ptr<ddp::TensorDataset> make_ratings(const TableSettings& tables) {
  const auto random = torch::make_generator<at::CPUGeneratorImpl>(1);
  const auto tastes = torch::randn({tables.users, 2}, random);
  const auto kinds = torch::randn({tables.items, 2}, random);
  const auto users = torch::randint(tables.users, {8000}, random, torch::kLong);
  const auto items = torch::randint(tables.items, {8000}, random, torch::kLong);
  return std::make_shared<ddp::TensorDataset>(
      torch::stack({users, items}, 1),
      (tastes.index_select(0, users) * kinds.index_select(0, items)).sum(1));
}

struct RecommenderImpl : torch::nn::Module {
  explicit RecommenderImpl(const TableSettings& tables) {
    const auto make_table = [&](int64_t rows) {
      torch::nn::Embedding table(torch::nn::EmbeddingOptions(rows, tables.dim).sparse(true));
      torch::nn::init::normal_(table->weight, 0, 0.1);
      return table;
    };
    users = register_module("users", make_table(tables.users));
    items = register_module("items", make_table(tables.items));
    head = register_module("head", torch::nn::Linear(tables.dim, 1));
    torch::nn::init::ones_(head->weight);
  }
  torch::Tensor forward(const torch::Tensor& pairs) {  // [N, 2]: a user and an item
    return head(users(pairs.select(1, 0)) * items(pairs.select(1, 1))).squeeze(1);
  }
  torch::nn::Embedding users{nullptr}, items{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Recommender);

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  const auto tables = cfg.section<TableSettings>("tables");
  Recommender module(tables);
  module->to(ctx.device());
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  // The rows have their own optimizer, because its state is read and written by rows too.
  auto rows = ddp::make_sparse_optimizer(model, cfg.section<ddp::SparseOptimizerOptions>("rows"));
  auto dense = ddp::make_optimizer(ddp::dense_parameters(model), cfg.optimizer);
  auto ratings = make_ratings(tables);
  ddp::DistributedSampler sampler(ratings->size(), ctx.communicator(), cfg.sampler);
  ddp::DataLoader loader(ratings, sampler, ctx.device(), cfg.loader);
  ddp::Metrics metrics(ctx, cfg.metrics);
  ddp::Checkpointer checkpointer(ctx, cfg.checkpoint, {model, rows, dense, loader});

  const auto num_steps = cfg.train.num_steps(loader.num_batches());
  const ddp::LrSchedule lr_schedule(cfg.lr_schedule, num_steps);
  auto step = checkpointer.restore();
  metrics.begin(step, num_steps, loader.num_batches());
  for (; step < num_steps; ++step) {
    const auto batch = loader.next();
    model.zero_grad();
    const auto loss = torch::mse_loss(model.forward(batch.data), batch.target);
    loss.backward();
    const auto lr = lr_schedule.at(step);
    rows->step(lr);
    dense->step(lr / 10);
    metrics.end_step(step, {.loss = loss, .num_samples = batch.size(), .lr = lr});
    checkpointer.save_if_due(step);
  }
  checkpointer.save(step - 1);
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(argc, argv, train,
                  {ddp::declare_section<TableSettings>("tables"),
                   ddp::declare_section<ddp::SparseOptimizerOptions>("rows"),
                   ddp::declare_section<DdpDefaults>("ddp"),
                   ddp::declare_section<OptimizerDefaults>("optimizer"),
                   ddp::declare_section<LrScheduleDefaults>("lr_schedule")});
}
