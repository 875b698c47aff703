// SPDX-License-Identifier: Apache-2.0
// Every order of the calls that leave something in .grad, and .grad that an earlier one left.
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ddp/reduce/join.hpp"
#include "distributed/ddp_test_utils.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

using Gradients = std::vector<torch::Tensor>;

constexpr char kCalls[] = {'B', 'W', 'b', 'w', '0'};  // capital: synchronised; w: weighted; 0: zero
constexpr double kTolerance = 1e-5;                   // counts of 3 and 5 do not divide exactly

std::vector<std::string> sequences_of(int num_calls) {
  std::vector<std::string> sequences{""};
  for (int i = 0; i < num_calls; ++i) {
    std::vector<std::string> longer;
    for (const auto& sequence : sequences) {
      for (const char call : kCalls) {
        longer.push_back(sequence + call);
      }
    }
    sequences = std::move(longer);
  }
  return sequences;
}

double count_of(int r, int call) {
  return call % 2 == 0 ? r + 1 : 3 - r % 2;
}

// The rule of docs/semantics.md, for the gradients of all ranks at once.
class Rule {
 public:
  /// Returns whether the call is refused. Adds gradients of `call`, which has this number.
  bool refuses(char call, int number) {
    if (call == '0') {
      *this = Rule();
      return false;
    }
    const bool is_weighted = call == 'W' || call == 'w';
    if (kind_ && *kind_ != is_weighted) {
      return true;
    }
    kind_ = is_weighted;
    for (int r = 0; r < world(); ++r) {
      const auto& own = gradients_of(r, number);
      add(sum_, own);
      if (r == rank()) {
        add(local_, own);
      }
      count_ += is_weighted ? count_of(r, number) : 0;
    }
    if (call == 'B' || call == 'W') {
      for (auto& gradient : sum_) {
        gradient.div_(is_weighted ? count_ : world());
      }
      add(mean_, sum_);
      sum_ = local_ = {};
      count_ = 0;
      kind_.reset();
    }
    return false;
  }

  /// .grad on this rank. Counts that wait keep means apart.
  Gradients expected() const {
    Gradients all;
    if (!(kind_ && *kind_)) {
      add(all, mean_);
    }
    add(all, local_);
    return all;
  }

 private:
  static const Gradients& gradients_of(int r, int number) {
    static std::map<std::pair<int, int>, Gradients> known;
    auto& gradients = known[{r, number}];
    if (gradients.empty()) {
      Mlp plain;
      loss_of(plain, batch_of(r, number, 4)).backward();
      gradients = grads_of(*plain);
    }
    return gradients;
  }
  static void add(Gradients& to, const Gradients& from) {
    for (size_t i = 0; i < from.size(); ++i) {
      if (i < to.size()) {
        to[i] = to[i] + from[i];
      } else {
        to.push_back(from[i].clone());
      }
    }
  }

  Gradients mean_, sum_, local_;
  double count_ = 0;
  std::optional<bool> kind_;  // of the local gradients: weighted; none: there are none
};

void run(DistributedDataParallel<Mlp>& model, char call, int number) {
  if (call == '0') {
    model.zero_grad();
    return;
  }
  std::optional<NoSync> local;
  if (call == 'b' || call == 'w') {
    local.emplace(model);
  }
  const auto loss = model.forward(batch_of(rank(), number, 4)).sum();
  if (call == 'W' || call == 'w') {
    model.weighted_backward(loss, count_of(rank(), number));
  } else {
    loss.backward();
  }
}

void require_close(const Gradients& actual, const Gradients& expected) {
  for (size_t i = 0; i < actual.size(); ++i) {
    INFO("parameter " << i);
    REQUIRE(actual[i].defined() == !expected.empty());
    if (actual[i].defined()) {
      INFO("actual " << actual[i] << "\nexpected " << expected[i]);
      REQUIRE(torch::allclose(actual[i], expected[i], kTolerance, kTolerance));
    }
  }
}

}  // namespace

TEST_CASE("every order of backwards, weighted, local or not, has its number or an error") {
  Mlp module;
  DistributedDataParallel model(module, group(), with_cap(1.0 / (1 << 20)));
  for (const auto& sequence : sequences_of(4)) {
    model.zero_grad();
    Rule rule;
    for (int number = 0; number < static_cast<int>(sequence.size()); ++number) {
      CAPTURE(sequence, number);
      const char call = sequence[static_cast<size_t>(number)];
      if (rule.refuses(call, number)) {
        REQUIRE_THROWS_WITH(run(model, call, number), Catch::Contains("weighted_backward") &&
                                                          Catch::Contains("fix: ") &&
                                                          Catch::Contains("zero_grad()"));
        rule.refuses('0', number);
        run(model, '0', number);
        REQUIRE_FALSE(rule.refuses(call, number));
        run(model, call, number);
      } else {
        run(model, call, number);
      }
      require_close(grads_of(*module), rule.expected());
    }
  }
}

TEST_CASE("backward() while counts wait is refused, also where zero_grad follows its forward") {
  const bool zeroes = GENERATE(false, true);
  Mlp module;
  DistributedDataParallel model(module, group());
  for (int round = 0; round < 2; ++round) {
    model.zero_grad();
    run(model, 'B', 0);
    run(model, 'w', 1);
    const auto loss = model.forward(batch_of(rank(), 2, 4)).sum();
    if (zeroes) {
      model.zero_grad();
    }
    REQUIRE_THROWS_WITH(loss.backward(),
                        Catch::Contains("zero_grad() (with set_to_none) before the forward"));
    model.zero_grad();
    run(model, 'B', 3);
    Rule rule;
    REQUIRE_FALSE(rule.refuses('B', 3));
    require_close(grads_of(*module), rule.expected());
  }
}

namespace {

// "some" takes part on request.
struct OptionalImpl : torch::nn::Module {
  OptionalImpl() { to(context().device()); }
  torch::Tensor forward(const torch::Tensor& factor, bool with_some) {
    const auto y = (always * factor).sum();
    return with_some ? y + (some * factor).sum() : y;
  }
  torch::Tensor always = register_parameter("always", torch::ones({3}));
  torch::Tensor some = register_parameter("some", torch::ones({5}));
};
TORCH_MODULE(Optional);

enum class Absent { Frozen, OnAllRanks, OnOtherRanks };

torch::Tensor factor_of_rank() {
  return torch::full({}, 4.0 * (rank() + 1), on_device());
}
double mean_factor() {
  return 2.0 * (world() + 1);
}

}  // namespace

TEST_CASE("a parameter that takes no part keeps its .grad, whatever an earlier backward left") {
  const auto absent = GENERATE(Absent::Frozen, Absent::OnAllRanks, Absent::OnOtherRanks);
  const bool is_weighted = GENERATE(false, true);
  const bool is_left_local = GENERATE(false, true);
  const bool is_own_tensor = GENERATE(false, true);
  CAPTURE(absent, is_weighted, is_left_local, is_own_tensor);
  Optional module;
  DdpOptions options;
  options.find_unused_parameters = absent != Absent::Frozen;
  DistributedDataParallel model(module, group(), options);
  const auto backward = [&](bool with_some) {
    const auto loss = model.forward(factor_of_rank(), with_some);
    if (is_weighted) {
      model.weighted_backward(loss, 1);  // so means are the same
    } else {
      loss.backward();
    }
  };
  if (is_left_local) {
    const auto local = model.no_sync();
    backward(true);
  } else {
    backward(true);
  }
  if (absent == Absent::Frozen) {
    module->some.set_requires_grad(false);
  }
  const bool uses_some = absent == Absent::OnOtherRanks && rank() == 0;
  const double divisor = is_weighted && is_left_local ? 2 * world() : world();
  const double first = mean_factor() * world() / divisor;
  const double added = absent == Absent::OnOtherRanks ? 4.0 : 0;  // rank 0's, undivided
  const auto require_some = [&](double value) {
    INFO("some " << module->some.grad() << ", expected " << value);
    REQUIRE(torch::allclose(module->some.grad(), torch::full({5}, value, on_device()), 1e-6));
  };
  backward(uses_some);
  // A gradient of no_sync() belongs to this backward, as in PyTorch.
  const double second = first + added / divisor;
  require_some(second);
  // Values of this rank alone show whether they are reduced.
  const double own = absent == Absent::OnOtherRanks ? 1 : rank() + 1;
  if (is_own_tensor) {
    module->some.mutable_grad() = torch::full({5}, second * own, on_device());
  } else {
    module->some.mutable_grad().mul_(own);
  }
  for (int step = 1; step <= 2; ++step) {
    const bool divides_own = is_own_tensor && is_weighted && absent == Absent::OnOtherRanks;
    if (divides_own) {
      return;  // a tensor of the caller's own is a part of the sum that the counts divide
    }
    backward(uses_some);
    require_some(second * own + step * added / world());
  }
}

TEST_CASE(
    "zero_grad between forward and backward drops a mean, also where a join divides by less") {
  Mlp module;
  Mlp reference;
  DistributedDataParallel model(module, group());
  JoinOptions options;
  options.divide_by_initial_world_size = false;
  join(
      model,
      [&] {
        for (int step = 0; step <= rank(); ++step) {  // the last rank has the most steps
          const auto loss = model.forward(batch_of(rank(), step, 4)).sum();
          model.zero_grad();
          loss.backward();
          reference->zero_grad();
          for (int r = step; r < world(); ++r) {
            reference->forward(batch_of(r, step, 4)).sum().backward();
          }
          auto expected = grads_of(*reference);
          for (auto& gradient : expected) {
            gradient.div_(world() - step);
          }
          require_close(grads_of(*module), expected);
        }
      },
      options);
}
