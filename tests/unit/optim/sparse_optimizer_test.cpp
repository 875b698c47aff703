// SPDX-License-Identifier: Apache-2.0
#include "ddp/optim/sparse.hpp"

#include <limits>

#include "ddp/amp/amp.hpp"
#include "support/catch.hpp"
#include "unit/optim/optim_test_support.hpp"

using namespace optim_test;
using ddp::SparseRule;

namespace {

constexpr int64_t kRows = 7;
constexpr int64_t kWidth = 5;
constexpr double kTableLr = 0.0625;

// The golden script has the same rows.
at::Tensor rows_of(int64_t step) {
  std::vector<int64_t> rows;
  if (step % 5 != 4) {
    rows = {step % kRows, (step + 2) % kRows, (step + 3) % kRows};
  }
  const auto count = static_cast<int64_t>(rows.size());
  return at::sparse_coo_tensor(at::tensor(rows, at::kLong).view({1, count}),
                               formula({count, kWidth}, 37, 101 * step, 257), {kRows, kWidth});
}

ddp::SparseOptimizerOptions options_of(const std::string& name) {
  if (name == "sgd") {
    return {.rule = SparseRule::Sgd};
  }
  if (name == "adagrad") {
    return {.rule = SparseRule::Adagrad, .lr_decay = 0.125, .initial_accumulator_value = 0.25};
  }
  return {.rule = SparseRule::SparseAdam, .beta1 = 0.75, .beta2 = 0.9};
}

struct Table {
  explicit Table(const std::string& name)
      : optimizer(ddp::make_sparse_optimizer(parameters, options_of(name))) {}

  at::Tensor weight() const { return parameters[0].tensor.detach(); }
  void run(int64_t from, int64_t to, const ddp::StepScalars& scalars = {.lr = kTableLr}) {
    for (int64_t step = from; step < to; ++step) {
      parameters[0].tensor.mutable_grad() = rows_of(step);
      optimizer->step(scalars);
    }
  }

  ddp::NamedParameters parameters{{"table.weight", weights({kRows, kWidth}, 0)}};
  std::unique_ptr<ddp::Optimizer> optimizer;
};

// Every operation rounds correctly, but vector instructions may fuse a product and a sum.
void check_close(const at::Tensor& actual, const nlohmann::json& golden) {
  const auto expected = at::tensor(golden.get<std::vector<double>>(), at::kDouble);
  CHECK(at::allclose(actual.flatten().to(at::kDouble), expected, 1e-6, 1e-7));
}

}  // namespace

TEST_CASE("Twenty sparse steps have the weights and the state of torch.optim", "[optim]") {
  const std::string name = GENERATE("sgd", "adagrad", "sparse_adam");
  INFO(name);
  const auto golden = read_golden("sparse_optimizer_golden.json").at(name);
  Table table(name);
  table.run(0, 20);
  check_close(table.weight(), golden.at("weight"));
  const auto state = table.optimizer->state_dict();
  CHECK(state.tensors.size() == (name == "sgd" ? 0 : golden.at("state").size()));
  for (const auto& [key, tensor] : state.tensors) {
    INFO(key);
    check_close(tensor, golden.at("state").at(key.slot));
  }
}

TEST_CASE("A step uses and changes only the rows of the gradient", "[optim]") {
  const std::string name = GENERATE("sgd", "adagrad", "sparse_adam");
  Table table(name);
  table.run(0, 1);
  const auto has_gradient = at::tensor({0, 1, 0, 1, 1, 0, 0}).to(at::kBool);  // in step 1
  auto state = deep_copy(table.optimizer->state_dict());
  for (auto& [key, tensor] : state.tensors) {
    if (tensor.dim() > 0) {
      tensor.masked_fill_(~has_gradient.unsqueeze(1), std::numeric_limits<float>::quiet_NaN());
    }
  }
  table.optimizer->load_state_dict(state);
  const auto before = table.weight().clone();
  table.run(1, 2);
  CHECK(at::equal(table.weight().ne(before).any(1), has_gradient));
  CHECK(table.weight().isfinite().all().item<bool>());
  for (const auto& [key, tensor] : table.optimizer->state_dict().tensors) {
    INFO(key);
    CHECK((tensor.dim() == 0 || at::equal(tensor.isfinite().all(1), has_gradient)));
  }
}

TEST_CASE("A refused sparse step changes nothing", "[optim]") {
  const ddp::NamedParameters tables{{"first", weights({kRows, kWidth}, 0)},
                                    {"second", weights({kRows, kWidth}, 1)}};
  const auto optimizer = ddp::make_sparse_optimizer(tables, {});
  tables[0].tensor.mutable_grad() = rows_of(0);
  tables[1].tensor.mutable_grad() = at::ones({kRows, kWidth});
  const auto before = tables[0].tensor.detach().clone();
  CHECK(contains(message_of([&] { optimizer->step(0.1); }), "gradient of second has layout"));
  CHECK(at::equal(tables[0].tensor.detach(), before));
  CHECK(optimizer->state_dict().tensors.empty());
}

TEST_CASE("A sparse optimizer resumes bit for bit", "[optim]") {
  const std::string name = GENERATE("sgd", "adagrad", "sparse_adam");
  Table whole(name);
  whole.run(0, 7);
  const auto saved = deep_copy(whole.optimizer->state_dict());
  Table resumed(name);
  resumed.weight().copy_(whole.weight());
  resumed.optimizer->load_state_dict(saved);
  whole.run(7, 14);
  resumed.run(7, 14);
  CHECK(at::equal(resumed.weight(), whole.weight()));
  auto wrong = saved;
  wrong.tensors["state.table.weight.nonsense"] = at::zeros({1});
  CHECK(contains(message_of<ddp::MismatchError>([&] { resumed.optimizer->load_state_dict(wrong); }),
                 "state.table.weight.nonsense is unexpected"));
  wrong = saved;
  wrong.values["type"] = std::string("adam");
  CHECK(contains(message_of<ddp::MismatchError>([&] { resumed.optimizer->load_state_dict(wrong); }),
                 "state of sparse_optimizer: type"));
}

TEST_CASE("A sparse step takes factors and found_inf", "[optim]") {
  const std::string name = GENERATE("sgd", "adagrad", "sparse_adam");
  Table plain(name);
  Table scaled(name);
  for (int64_t step = 0; step < 4; ++step) {
    plain.run(step, step + 1);
    scaled.parameters[0].tensor.mutable_grad() = rows_of(step) * 8;
    scaled.optimizer->step(
        {.lr = kTableLr, .inverse_scale = 0.25, .clip_factor = at::scalar_tensor(0.5)});
  }
  CHECK(at::equal(scaled.weight(), plain.weight()));
  const auto before = plain.weight().clone();
  plain.run(4, 6, {.lr = kTableLr, .found_inf = 1.0});
  CHECK(at::equal(plain.weight(), before));
  CHECK_FALSE(plain.optimizer->capturable());
  CHECK_FALSE(plain.optimizer->supports_found_inf());
}

TEST_CASE("clip_grad_norm_, scans and a GradScaler read rows", "[optim]") {
  Table table("sgd");
  auto& grad = table.parameters[0].tensor.mutable_grad();
  grad = rows_of(1);
  CHECK(contains(message_of([&] { ddp::clip_grad_norm_(table.parameters, 1.0); }),
                 "gradient of table.weight is of layout Sparse and not coalesced"));
  CHECK(contains(message_of([&] { table.optimizer->scan_gradients(); }),
                 "gradient of table.weight is of layout Sparse and not coalesced"));
  {  // each part of a sum is divided
    ddp::GradScaler scaler({.grad_scaling = ddp::GradScaling::On, .init_scale = 4});
    scaler.scale(at::ones({}));
    grad = rows_of(1) + rows_of(1);
    REQUIRE(!grad.is_coalesced());
    scaler.unscale_(*table.optimizer);
    CHECK(at::equal(grad.to_dense(), rows_of(1).to_dense() / 2));
  }
  grad = rows_of(1).coalesce();
  const double norm = grad.to_dense().norm().item<double>();
  CHECK(table.optimizer->scan_gradients().norm.item<double>() == Approx(norm));
  CHECK(ddp::clip_grad_norm_(table.parameters, norm / 2).item<double>() == Approx(norm));
  CHECK(grad.to_dense().norm().item<double>() == Approx(norm / 2));

  ddp::GradScaler scaler({.grad_scaling = ddp::GradScaling::On, .init_scale = 4});
  scaler.scale(at::ones({}));
  const auto before = table.weight().clone();
  grad._values().fill_(4);
  scaler.step(*table.optimizer, 1.0);
  CHECK(at::equal(table.weight().sum(), before.sum() - 3 * kWidth));
  scaler.update();
  scaler.scale(at::ones({}));
  grad._values().select(0, 1).fill_(std::numeric_limits<float>::infinity());
  const auto kept = table.weight().clone();
  scaler.step(*table.optimizer, 1.0);
  CHECK(at::equal(table.weight(), kept));
  CHECK(table.optimizer->scan_gradients().first_non_finite.item<int>() == 0);
}

TEST_CASE("A sparse optimizer refuses what it cannot update", "[optim]") {
  Table table("adagrad");
  table.parameters[0].tensor.mutable_grad() = at::ones({kRows, kWidth});
  CHECK(contains(message_of([&] {
                   table.run(4, 4);
                   table.optimizer->step(0.1);
                 }),
                 "gradient of table.weight has layout Strided"));
  CHECK(contains(message_of([&] { table.optimizer->step(); }), "needs a learning rate"));
  const auto make = [](at::ScalarType dtype, const ddp::SparseOptimizerOptions& options) {
    return ddp::make_sparse_optimizer({{"w", at::zeros({2, 2}, dtype).requires_grad_()}}, options);
  };
  CHECK(contains(message_of([&] { make(at::kBFloat16, {}); }), "parameter w is BFloat16"));
  CHECK(contains(message_of([&] { make(at::kFloat, {.beta1 = 1.0}); }), "beta1=1 must be"));
  CHECK(contains(message_of([&] { make(at::kFloat, {.eps = -1.0}); }), "eps=-1 must be"));
  CHECK(contains(message_of([&] { make(at::kFloat, {.lr_decay = -1.0}); }), "lr_decay=-1 must be"));
}
