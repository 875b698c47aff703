// SPDX-License-Identifier: Apache-2.0
#include "train/graph/captured_step.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty_strided.h>

#include "train/graph/capture_failure.hpp"
#include "train/graph/step_publisher.hpp"

namespace ddp::detail {

CapturedStep::CapturedStep(const StepFeed& feed, GraphPool& pool)
    : arguments_(feed.arguments()), pool_(pool.id()) {}

// The call's inputs become this graph's. Their contents are the first arguments.
void CapturedStep::make_inputs(const Request& request) {
  int number = StepFeed::kFirstFree;
  for (const at::Tensor* input : request.call.inputs) {
    auto& own = inputs_.emplace_back();
    if (!input->defined()) {
      continue;
    }
    if (input->is_cpu()) {
      require_fed(*input, number);
      own = request.feed.numbers_like(*input, number);
      number += static_cast<int>(input->numel());
    } else {
      own = at::empty_strided(input->sizes(), input->strides(), input->options());
      own.set_requires_grad(input->requires_grad());
    }
  }
  set_arguments(request.call.numbers, request.sequence, request.call.inputs);
  for (size_t i = 0; i < inputs_.size(); ++i) {
    *request.call.inputs[i] = inputs_[i];
  }
}

void CapturedStep::set_arguments(const StepNumbers& numbers, uint64_t sequence,
                                 const std::vector<at::Tensor*>& from) {
  set_step_numbers(numbers, sequence, arguments_);
  for (size_t i = 0; i < from.size(); ++i) {
    if (!from[i]->defined()) {
      continue;
    }
    if (from[i]->is_cpu()) {
      append_numbers(*from[i], arguments_);
    } else {
      append_copy(*from[i], inputs_[i].mutable_data_ptr(), arguments_);
    }
  }
}

// The part of a capture that the graph records.
void CapturedStep::run(const Request& request) {
  auto output = request.call.run(request.feed.scalars());
  const auto logged = StepRing::scalars_of(output.tensors);
  publish(logged, request.feed, request.ring);
  num_scalars_ = static_cast<int>(logged.size());
  object_ = std::move(output.object);
}

std::unique_ptr<CapturedStep> CapturedStep::capture(const Request& request, std::string* failing) {
  std::unique_ptr<CapturedStep> step(new CapturedStep(request.feed, request.pool));
  step->make_inputs(request);
  const auto device = request.feed.device();
  const int64_t missing = missing_bytes(device, *step->pool_, request.step_bytes);
  // Clears casts made by an autocast scope outside the step: the graph would use these stale
  // weights forever.
  at::autocast::clear_cache();
  const FailingOperation failing_operation;
  auto& graph = step->graph_;
  try {
    graph.begin(*step->pool_, request.generators, step->arguments_);
    reserve_block(missing, device);
    step->run(request);
    at::autocast::clear_cache();
    request.at_end();
    graph.end();
    if (const auto copies = graph.host_copies(); !copies.empty()) {
      throw SettingsError("it " + copies);
    }
  } catch (...) {
    *failing = failing_operation.names();
    at::autocast::clear_cache();
    graph.abandon();
    throw;
  }
  return step;
}

void CapturedStep::instantiate() {
  graph_.instantiate();
}

void CapturedStep::replay(const StepNumbers& numbers, uint64_t sequence,
                          const std::vector<at::Tensor*>& inputs) {
  set_arguments(numbers, sequence, inputs);
  graph_.launch(arguments_);
}

int64_t CapturedStep::num_nodes() const {
  return graph_.num_nodes();
}

}  // namespace ddp::detail
