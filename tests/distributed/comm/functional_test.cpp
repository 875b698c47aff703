// SPDX-License-Identifier: Apache-2.0
// Collectives with gradients. The reference is one process that computes the results of all ranks
// and differentiates the sum of all ranks' losses. All numbers are exact.
#include "ddp/comm/functional.hpp"

#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "ddp/core/error.hpp"
#include "distributed/comm/functional_test_utils.hpp"
#include "support/message_of.hpp"

using namespace ddp;
using namespace ddp::test;
using testing::message_of;

namespace {

// A collective, and the results of all ranks by one process.
struct Case {
  std::string name;
  std::function<Sizes(int)> shape;  // of a rank's input
  std::function<Tensor(const Tensor&)> collective;
  std::function<Tensors(const Tensors&)> reference;
};

Tensors same_on_all(const Tensor& result) {
  return Tensors(static_cast<size_t>(world()), result);
}

Tensors scattered(const Tensor& rows) {
  return rows.chunk(world());
}

std::vector<Case> cases() {
  const auto equal = [](int) { return Sizes{2, 3}; };
  const auto per_rank = [](int) { return Sizes{2 * world(), 3}; };
  const auto uneven = for_ranks([](int r) { return r == 1 ? 0 : r + 1; });
  const auto sent_by = [](int sender) {
    return for_ranks([sender](int receiver) { return rows_sent(sender, receiver); });
  };
  const auto received_by = [](int receiver) {
    return for_ranks([receiver](int sender) { return rows_sent(sender, receiver); });
  };
  const auto mean = [](const Tensors& x) { return sum_of(x) / world(); };
  return {
      {"all_gather", equal, [](const Tensor& x) { return all_gather_with_grad(x, group()); },
       [](const Tensors& x) { return same_on_all(torch::cat(x)); }},
      {"all_gather of scalars", [](int) { return Sizes{}; },
       [](const Tensor& x) { return all_gather_with_grad(x, group()); },
       [](const Tensors& x) { return same_on_all(torch::stack(x)); }},
      {"all_gather of nothing",
       [](int) {
         return Sizes{0, 3};
       },
       [](const Tensor& x) { return all_gather_with_grad(x, group()); },
       [](const Tensors& x) { return same_on_all(torch::cat(x)); }},
      {"all_gather of unequal parts",
       [uneven](int r) {
         return Sizes{uneven[static_cast<size_t>(r)], 3};
       },
       [uneven](const Tensor& x) { return all_gather_with_grad(x, group(), uneven); },
       [](const Tensors& x) { return same_on_all(torch::cat(x)); }},
      {"all_reduce", equal, [](const Tensor& x) { return all_reduce_with_grad(x, group()); },
       [](const Tensors& x) { return same_on_all(sum_of(x)); }},
      {"all_reduce, mean", equal,
       [](const Tensor& x) { return all_reduce_with_grad(x, group(), ReduceOp::Avg); },
       [mean](const Tensors& x) { return same_on_all(mean(x)); }},
      {"reduce_scatter", per_rank,
       [](const Tensor& x) { return reduce_scatter_with_grad(x, group()); },
       [](const Tensors& x) { return scattered(sum_of(x)); }},
      {"reduce_scatter, mean", per_rank,
       [](const Tensor& x) { return reduce_scatter_with_grad(x, group(), ReduceOp::Avg); },
       [mean](const Tensors& x) { return scattered(mean(x)); }},
      {"all_to_all", per_rank, [](const Tensor& x) { return all_to_all_with_grad(x, group()); },
       [](const Tensors& x) {
         return exchanged(x, [](int) { return for_ranks([](int) { return 2; }); });
       }},
      {"all_to_all of unequal parts",
       [sent_by](int r) {
         return Sizes{sum_of(sent_by(r)), 3};
       },
       [=](const Tensor& x) {
         return all_to_all_with_grad(x, group(), received_by(rank()), sent_by(rank()));
       },
       [sent_by](const Tensors& x) { return exchanged(x, sent_by); }},
  };
}

Tensor input_of(const Case& c, int r, torch::ScalarType dtype = torch::kFloat) {
  return integers(c.shape(r), 10 + r).to(dtype);
}

// A loss of rank r that is not linear in its results. Its gradient differs between ranks.
Tensor own_loss(const Tensor& result, int r) {
  const auto values = result.to(torch::kDouble);
  const auto factors = integers(values.sizes().vec(), 50 + r).to(torch::kDouble);
  return (values * factors).sum() + values.square().sum();
}

// Runs all ranks in this process. `losses` gets the ranks' results.
Tensor gradient_of_all(
    const Case& c, torch::ScalarType dtype,
    const std::function<Tensor(const Tensor& result, int r)>& loss =
        [](const Tensor& result, int r) { return own_loss(result, r); }) {
  Tensors inputs;
  for (int r = 0; r < world(); ++r) {
    inputs.push_back(input_of(c, r, torch::kDouble).requires_grad_());
  }
  const auto results = c.reference(inputs);
  auto total = torch::zeros({}, on_device().dtype(torch::kDouble));
  for (int r = 0; r < world(); ++r) {
    total = total + loss(results[static_cast<size_t>(r)], r);
  }
  total.backward();
  return inputs[static_cast<size_t>(rank())].grad().to(dtype);
}

void require_same(const Tensor& actual, const Tensor& expected) {
  REQUIRE(actual.defined());
  REQUIRE(actual.scalar_type() == expected.scalar_type());
  INFO("actual " << actual << "\nexpected " << expected);
  REQUIRE(actual.equal(expected));
}

}  // namespace

TEST_CASE("results and gradients are those of one process and the sum of all ranks' losses") {
  for (const auto& c : cases()) {
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf}) {
      INFO(c.name << ", " << dtype);
      auto x = input_of(c, rank(), dtype).requires_grad_();
      const auto result = c.collective(x);
      Tensors inputs;
      for (int r = 0; r < world(); ++r) {
        inputs.push_back(input_of(c, r, torch::kDouble));
      }
      require_same(result.detach(), c.reference(inputs)[static_cast<size_t>(rank())].to(dtype));
      REQUIRE(result.is_contiguous());
      own_loss(result, rank()).backward();
      require_same(x.grad(), gradient_of_all(c, dtype));
    }
  }
}

TEST_CASE("inputs and gradients with any strides") {
  for (const auto& c : cases()) {
    if (c.shape(rank()).size() < 2) {
      continue;
    }
    INFO(c.name);
    // Columns of a transposed tensor, with gaps; the gradient arrives transposed.
    const auto values = input_of(c, rank());
    auto x = torch::stack({values, values}, -1).transpose(0, 1).contiguous().transpose(0, 1);
    x = x.select(-1, 1).detach().requires_grad_();
    REQUIRE((values.numel() == 0 || !x.is_contiguous()));
    const auto result = c.collective(x).t();
    own_loss(result.contiguous().t(), rank()).backward();
    require_same(x.grad().contiguous(), gradient_of_all(c, torch::kFloat));
  }
}

TEST_CASE("a result that is used twice, and a gradient that is expanded") {
  const auto sum = [](const Tensor& result, int) { return result.sum(); };
  const auto twice = [](const Tensor& result, int r) { return own_loss(result, r) + result.sum(); };
  for (const auto& c : cases()) {
    for (const auto& loss : {std::function<Tensor(const Tensor&, int)>(sum),
                             std::function<Tensor(const Tensor&, int)>(twice)}) {
      INFO(c.name);
      auto x = input_of(c, rank()).requires_grad_();
      loss(c.collective(x), rank()).backward();
      require_same(x.grad(), gradient_of_all(c, torch::kFloat, loss));
    }
  }
}

TEST_CASE(
    "inputs without gradient call no collective in backward; nothing is recorded in no_grad") {
  for (const auto& c : cases()) {
    INFO(c.name);
    auto queries = input_of(c, rank()).requires_grad_();
    const auto keys = c.collective(input_of(c, rank()));  // alike on all ranks
    REQUIRE_FALSE(keys.requires_grad());
    const auto result = c.collective(queries);
    (result * keys).sum().backward();
    Tensors inputs;
    for (int r = 0; r < world(); ++r) {
      inputs.push_back(input_of(c, r, torch::kDouble));
    }
    const auto all_keys = c.reference(inputs);
    const auto loss = [&](const Tensor& r, int of) {
      return (r * all_keys[static_cast<size_t>(of)]).sum();
    };
    require_same(queries.grad(), gradient_of_all(c, torch::kFloat, loss));
    const torch::NoGradGuard no_grad;
    REQUIRE_FALSE(c.collective(queries).requires_grad());
  }
}

TEST_CASE("derivatives may be differentiated again") {
  for (const auto& c : cases()) {
    INFO(c.name);
    auto x = input_of(c, rank(), torch::kDouble).requires_grad_();
    const auto y = c.collective(x);
    const auto first = torch::autograd::grad({(y * y * y).sum()}, {x}, {}, true, true)[0];
    (first * integers(first.sizes().vec(), rank())).sum().backward();

    Tensors inputs, weighted;
    for (int r = 0; r < world(); ++r) {
      inputs.push_back(input_of(c, r, torch::kDouble).requires_grad_());
    }
    auto total = torch::zeros({}, on_device().dtype(torch::kDouble));
    for (const auto& result : c.reference(inputs)) {
      total = total + (result * result * result).sum();
    }
    const auto firsts = torch::autograd::grad({total}, inputs, {}, true, true);
    auto second = torch::zeros({}, on_device().dtype(torch::kDouble));
    for (int r = 0; r < world(); ++r) {
      const auto& of_rank = firsts[static_cast<size_t>(r)];
      second = second + (of_rank * integers(of_rank.sizes().vec(), r)).sum();
    }
    second.backward();
    require_same(x.grad(), inputs[static_cast<size_t>(rank())].grad());
  }
}

TEST_CASE("backwards run in the reverse order of the calls, whatever the ranks' losses look like") {
  // Each result has another size, so collectives in another order would not fit.
  auto first = integers({2, 3}, rank()).requires_grad_();
  auto second = integers({4, 5}, rank()).requires_grad_();
  auto third = integers({6, 7}, rank()).requires_grad_();
  const auto a = all_gather_with_grad(first, group());
  const auto b = all_gather_with_grad(second, group());
  const auto c = all_gather_with_grad(third, group());
  const auto far = [](const Tensor& x) { return ((x * 2 + 1) * 2 + 1).square().sum(); };
  const auto near = [](const Tensor& x) { return x.sum(); };
  const auto loss =
      rank() % 2 == 0 ? far(a) + near(b) + far(c) : near(c) + (far(b) + far(a)) + near(b);
  loss.backward();
  // d far / dx = 2 (4 x + 3) * 4; of the even ranks a and c, of the odd ranks a and b.
  const auto slope_far = [](const Tensor& x) { return (x * 4 + 3) * 8; };
  const double even = (world() + 1) / 2, odd = world() / 2;
  require_same(first.grad(), slope_far(first.detach()) * (even + odd));
  require_same(second.grad(), slope_far(second.detach()) * odd + (even + odd));
  require_same(third.grad(), slope_far(third.detach()) * even + odd);
}

namespace {

// As in tests/golden/make_functional_golden.py.
Tensor golden_input(int64_t rows) {
  const auto i = torch::arange(rows * 3);
  return ((torch::remainder(i * 7 + rank() * 5, 11) - 5).to(torch::kFloat) / 4)
      .view({rows, 3})
      .to(context().device());
}
Tensor golden_coefficients(const Tensor& like) {
  const auto i = torch::arange(like.numel());
  return ((torch::remainder(i * 3 + rank() * 7, 13) - 6).to(torch::kFloat) / 4)
      .view(like.sizes())
      .to(context().device());
}

Tensor numbers_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<float> numbers;
  for (float number = 0; stream >> number;) {
    numbers.push_back(number);
  }
  return torch::tensor(numbers, torch::kFloat);
}

}  // namespace

TEST_CASE("results and gradients are PyTorch's") {
  const auto sent = for_ranks([](int r) { return rows_sent(rank(), r); });
  const auto received = for_ranks([](int r) { return rows_sent(r, rank()); });
  const auto for_all = 2 * world();
  struct Golden {
    int64_t rows;
    std::function<Tensor(const Tensor&)> collective;
  };
  const std::map<std::string, Golden> collectives = {
      {"all_gather", {2, [](const Tensor& x) { return all_gather_with_grad(x, group()); }}},
      {"all_reduce_sum", {2, [](const Tensor& x) { return all_reduce_with_grad(x, group()); }}},
      {"all_reduce_avg",
       {2, [](const Tensor& x) { return all_reduce_with_grad(x, group(), ReduceOp::Avg); }}},
      {"reduce_scatter",
       {for_all, [](const Tensor& x) { return reduce_scatter_with_grad(x, group()); }}},
      {"all_to_all", {for_all, [](const Tensor& x) { return all_to_all_with_grad(x, group()); }}},
      {"all_to_all_sizes", {sum_of(sent), [&](const Tensor& x) {
                              return all_to_all_with_grad(x, group(), received, sent);
                            }}}};
  std::ifstream file(DDP_GOLDEN_DIR "/functional_golden.csv");
  size_t num_seen = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream stream(line);
    std::string name, world_size, of_rank, result, gradient;
    std::getline(stream, name, ',');
    std::getline(stream, world_size, ',');
    std::getline(stream, of_rank, ',');
    std::getline(stream, result, ',');
    std::getline(stream, gradient, ',');
    if (name[0] == '#' || std::stoi(world_size) != world() || std::stoi(of_rank) != rank()) {
      continue;
    }
    INFO(name);
    ++num_seen;
    auto x = golden_input(collectives.at(name).rows).requires_grad_();
    const auto y = collectives.at(name).collective(x);
    (golden_coefficients(y) * y + y.square()).sum().backward();
    require_same(y.detach().cpu().flatten(), numbers_of(result));
    require_same(x.grad().cpu().flatten(), numbers_of(gradient));
  }
  REQUIRE(num_seen == collectives.size());
}

TEST_CASE("wrong arguments are refused with the fix") {
  const auto refused = [](const auto& call) { return message_of<SettingsError>(call); };
  const auto x = torch::ones({world() + 1, 2}, on_device());
  CHECK_THAT(refused([&] { all_gather_with_grad(x, nullptr); }),
             Catch::Contains("all_gather_with_grad: the communicator is null"));
  CHECK_THAT(refused([&] { all_gather_with_grad({}, group()); }),
             Catch::Contains("all_gather_with_grad: input is an undefined tensor"));
  CHECK_THAT(refused([&] { all_reduce_with_grad(x, group(), ReduceOp::Max); }),
             Catch::Contains("all_reduce_with_grad: the operation max has no gradient here"));
  CHECK_THAT(refused([&] { reduce_scatter_with_grad(x, group(), ReduceOp::Product); }),
             Catch::Contains("the operation product has no gradient here"));
  if (world() > 1) {
    CHECK_THAT(refused([&] { reduce_scatter_with_grad(x, group()); }),
               Catch::Contains("cannot be cut into " + std::to_string(world())));
    CHECK_THAT(refused([&] { all_to_all_with_grad(x, group()); }),
               Catch::Contains("fix: give output_sizes and input_sizes"));
  }
  CHECK_THAT(refused([&] { all_to_all_with_grad(torch::ones({}, on_device()), group()); }),
             Catch::Contains("of shape [] cannot be cut"));
  const Sizes negative(static_cast<size_t>(world()), -1),
      too_many(static_cast<size_t>(world() + 1));
  CHECK_THAT(
      refused([&] { all_gather_with_grad(x, group(), negative); }),
      Catch::Contains("all_gather_with_grad: sizes=[-1") && Catch::Contains("a negative entry"));
  CHECK_THAT(refused([&] { all_to_all_with_grad(x, group(), too_many, too_many); }),
             Catch::Contains("all_to_all_with_grad: output_sizes has"));
  CHECK_THAT(refused([&] { all_gather_with_grad(x.to_sparse(), group()); }),
             Catch::Contains("all_gather_with_grad: input has layout Sparse"));
  CHECK_THAT(refused([&] { all_gather_with_grad(x.to(torch::kComplexFloat), group()); }),
             Catch::Contains("all_gather_with_grad: input has dtype ComplexFloat"));
  CHECK_THAT(refused([&] {
               const GroupScope scope(*group());
               all_reduce_with_grad(x, group());
             }),
             Catch::Contains("all_reduce_with_grad: waits for its result"));
}

TEST_CASE("check_collectives names the shapes of ranks that differ") {
  if (world() < 2 || !checks_collectives()) {
    return;
  }
  const int64_t rows = rank() == 1 ? 3 : 2;
  const auto gather = [&] { all_gather_with_grad(torch::ones({rows, 2}, on_device()), group()); };
  const auto elements = [](int64_t of_rank) {
    return "all_gather (" + std::to_string(2 * of_rank * world()) + " Float)";
  };
  CHECK_THAT(message_of<MismatchError>(gather),
             Catch::Contains("rank 0 called " + elements(2) + ", rank 1 called " + elements(3)));
}
