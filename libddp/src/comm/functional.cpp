// SPDX-License-Identifier: Apache-2.0
// Each backward is another of these functions, so second derivatives need no code of their own.
#include "ddp/comm/functional.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "comm/argument_checks.hpp"
#include "comm/thread_group.hpp"
#include "core/control/rank_position.hpp"
#include "ddp/core/error.hpp"

namespace ddp {
namespace {

using Sizes = std::vector<int64_t>;

/// A collective and the one that its backward calls.
struct Transfer : torch::CustomClassHolder {
  using Function = std::function<at::Tensor(const at::Tensor&)>;

  Transfer(Function forward_in, Function backward_in)
      : forward(std::move(forward_in)), backward(std::move(backward_in)) {}

  const Function forward;
  const Function backward;
};

class Collective : public torch::autograd::Function<Collective> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                            const c10::intrusive_ptr<Transfer>& transfer) {
    ctx->saved_data["transfer"] = c10::IValue::make_capsule(transfer);
    return transfer->forward(input.contiguous());
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto capsule = ctx->saved_data.at("transfer").toCapsule();
    return {static_cast<const Transfer&>(*capsule).backward(grads[0]), at::Tensor()};
  }
};

at::Tensor apply(const at::Tensor& input, Transfer::Function forward, Transfer::Function backward) {
  return Collective::apply(input,
                           c10::make_intrusive<Transfer>(std::move(forward), std::move(backward)));
}

template <typename... Args>
[[noreturn]] void refuse(const char* name, const Args&... args) {
  throw SettingsError(concat(name, ": ", args...));
}

void check_arguments(const char* name, const at::Tensor& input,
                     const CommunicatorPtr& communicator) {
  if (communicator == nullptr) {
    refuse(name, "the communicator is null; fix: use Context::communicator()");
  }
  if (detail::ThreadGroup::is_open()) {
    refuse(name,
           "waits for its result, and a GroupScope is open in this thread; fix: call it "
           "before or after the scope");
  }
  if (communicator->world_size() > 1) {
    detail::refuse_in_uneven_loop(name);
  }
  detail::check_any_strides(*communicator, name, "input", input);
}

void check_linear(const char* name, ReduceOp op) {
  if (op != ReduceOp::Sum && op != ReduceOp::Avg) {
    refuse(name, "the operation ", to_string(op),
           " has no gradient here; allowed are sum and avg; fix: use Communicator::all_reduce for "
           "values without gradient");
  }
}

void check_equal_parts(const char* name, const at::Tensor& input, int world_size,
                       const char* fix = "") {
  if (input.dim() == 0 || input.size(0) % world_size != 0) {
    refuse(name, "input of shape ", input.sizes(), " cannot be cut into ", world_size,
           " (ranks) parts of equal numbers of rows", fix);
  }
}

int64_t sum_of(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

at::Tensor empty_rows(const at::Tensor& like, int64_t num_rows) {
  auto shape = like.sizes().vec();
  if (shape.empty()) {
    shape.emplace_back();
  }
  shape[0] = num_rows;
  return at::empty(shape, like.options());
}

}  // namespace

at::Tensor all_gather_with_grad(const at::Tensor& input, const CommunicatorPtr& communicator,
                                at::IntArrayRef sizes) {
  check_arguments("all_gather_with_grad", input, communicator);
  if (sizes.empty()) {
    return apply(
        input,
        [communicator](const at::Tensor& x) {
          const auto rows = x.dim() == 0 ? 1 : x.size(0);
          auto output = empty_rows(x, rows * communicator->world_size());
          communicator->all_gather(output, x)->wait();
          return output;
        },
        [communicator, shape = input.sizes().vec()](const at::Tensor& grad) {
          return reduce_scatter_with_grad(grad, communicator).view(shape);
        });
  }
  detail::check_sizes(*communicator, "all_gather_with_grad", "sizes", sizes);
  return apply(
      input,
      [communicator, sizes = sizes.vec()](const at::Tensor& x) {
        auto output = empty_rows(x, sum_of(sizes));
        communicator->all_gather(output, x, sizes)->wait();
        return output;
      },
      [communicator, sizes = sizes.vec(), shape = input.sizes().vec()](const at::Tensor& grad) {
        // Each rank receives the gradients of its own rows from all ranks.
        const Sizes own(sizes.size(), shape[0]);
        const auto parts = all_to_all_with_grad(grad, communicator, own, sizes);
        auto by_rank = shape;
        by_rank.insert(by_rank.begin(), communicator->world_size());
        return parts.view(by_rank).sum(0);
      });
}

at::Tensor all_reduce_with_grad(const at::Tensor& input, const CommunicatorPtr& communicator,
                                ReduceOp op) {
  check_arguments("all_reduce_with_grad", input, communicator);
  check_linear("all_reduce_with_grad", op);
  return apply(
      input,
      [communicator, op](const at::Tensor& x) {
        auto output = x.clone();
        communicator->all_reduce(output, op)->wait();
        return output;
      },
      [communicator, op](const at::Tensor& grad) {
        return all_reduce_with_grad(grad, communicator, op);
      });
}

at::Tensor reduce_scatter_with_grad(const at::Tensor& input, const CommunicatorPtr& communicator,
                                    ReduceOp op) {
  check_arguments("reduce_scatter_with_grad", input, communicator);
  check_linear("reduce_scatter_with_grad", op);
  const auto world_size = communicator->world_size();
  check_equal_parts("reduce_scatter_with_grad", input, world_size);
  return apply(
      input,
      [communicator, op](const at::Tensor& x) {
        auto output = empty_rows(x, x.size(0) / communicator->world_size());
        communicator->reduce_scatter(output, x, op)->wait();
        return output;
      },
      [communicator, op](const at::Tensor& grad) {
        const auto all = all_gather_with_grad(grad, communicator);
        return op == ReduceOp::Avg ? all / communicator->world_size() : all;
      });
}

at::Tensor all_to_all_with_grad(const at::Tensor& input, const CommunicatorPtr& communicator,
                                at::IntArrayRef output_sizes, at::IntArrayRef input_sizes) {
  check_arguments("all_to_all_with_grad", input, communicator);
  if (output_sizes.empty()) {
    check_equal_parts("all_to_all_with_grad", input, communicator->world_size(),
                      "; fix: give output_sizes and input_sizes");
  } else {
    detail::check_sizes(*communicator, "all_to_all_with_grad", "output_sizes", output_sizes);
  }
  const auto received = output_sizes.vec();
  const auto sent = input_sizes.vec();
  return apply(
      input,
      [communicator, received, sent](const at::Tensor& x) {
        auto output = empty_rows(x, received.empty() ? x.size(0) : sum_of(received));
        communicator->all_to_all(output, x, received, sent)->wait();
        return output;
      },
      [communicator, received, sent](const at::Tensor& grad) {
        return all_to_all_with_grad(grad, communicator, sent, received);
      });
}

}  // namespace ddp
