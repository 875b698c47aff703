// SPDX-License-Identifier: Apache-2.0
#include "tensors/model_call.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "ddp/data/distributed_sampler.hpp"
#include "ddp/detail/text.hpp"

namespace examples {
namespace {

using ddp::concat;
using ddp::SettingsError;
using ddp::detail::printable;

using NamedOutput = std::pair<std::string, c10::IValue>;

std::vector<NamedOutput> named_outputs(const c10::IValue& outputs) {
  std::vector<NamedOutput> named;
  if (outputs.isGenericDict()) {
    for (const auto& entry : outputs.toGenericDict()) {
      named.emplace_back(entry.key().isString() ? entry.key().toStringRef() : concat(entry.key()),
                         entry.value());
    }
  } else if (outputs.isTuple()) {
    for (const auto& element : outputs.toTupleRef().elements()) {
      named.emplace_back(std::to_string(named.size()), element);
    }
  } else if (outputs.isList()) {
    for (const c10::IValue& element : outputs.toListRef()) {
      named.emplace_back(std::to_string(named.size()), element);
    }
  } else {
    named.emplace_back("0", outputs);
  }
  return named;
}

std::string names_of(const std::vector<NamedOutput>& outputs) {
  std::string names;
  for (const auto& [name, value] : outputs) {
    names += concat(names.empty() ? "" : ", ", printable(name),
                    value.isTensor() ? "" : concat(" (a ", value.tagKind(), ")"));
  }
  return names.empty() ? "nothing" : names;
}

}  // namespace

SettingsError with_target_hint(const ddp::MissingArgumentError& error) {
  return SettingsError(concat(error.what(), "; fix: if the program computes its loss, set ",
                              "model.loss=in_graph, which gives it the target too"));
}

void check_training_batches(const ddp::Context& ctx, const ddp::Config& cfg, int64_t num_samples,
                            const std::function<void(int64_t size)>& check) {
  if (cfg.loader.global_batch_size > 0) {
    return;  // shares of ranks and micro-batches have many sizes
  }
  const ddp::DistributedSampler sampler(num_samples, ctx.communicator(), cfg.sampler);
  const auto whole = std::min(cfg.loader.batch_size, sampler.num_samples());
  const auto last = cfg.loader.drop_last ? 0 : sampler.num_samples() % cfg.loader.batch_size;
  for (const auto size : {whole, last}) {
    try {
      if (size > 0) {
        check(size);
      }
    } catch (const ddp::InputSizeError& error) {
      throw SettingsError(concat(
          size == whole ? "a training batch of " : "the last training batch of an epoch, of ", size,
          size == 1 ? " sample: " : " samples: ", error.what(),
          size == whole ? "; train.batch_size sets the size"
                        : "; fix: loader.drop_last=true, which leaves it out"));
    }
  }
}

at::Tensor as_input(const at::Tensor& input, c10::ScalarType parameter_dtype) {
  return input.is_floating_point() ? input.to(parameter_dtype) : input;
}

at::Tensor select_output(const c10::IValue& outputs, const std::string& name) {
  const auto named = named_outputs(outputs);
  for (const auto& [key, value] : named) {
    if (name.empty() ? value.isTensor() : key == name) {
      if (value.isTensor()) {
        return value.toTensor();
      }
      throw SettingsError(concat("model.output=", name, " is a ", value.tagKind(),
                                 ", not a tensor; the program returns: ", names_of(named)));
    }
  }
  throw SettingsError(concat(name.empty() ? "the program returns no tensor at its top level"
                                          : concat("model.output=", name, " does not exist"),
                             "; the program returns: ", names_of(named),
                             "; fix: set model.output to one of them"));
}

at::Tensor loss_in_graph(const c10::IValue& outputs, const std::string& name) {
  const bool has_loss = name.empty() && outputs.isGenericDict() &&
                        outputs.toGenericDict().contains(std::string("loss"));
  const auto loss = select_output(outputs, has_loss ? "loss" : name);
  if (loss.numel() != 1 || !loss.is_floating_point()) {
    throw SettingsError(concat("model.loss=in_graph needs a scalar loss, but the output is ",
                               loss.scalar_type(), ' ', loss.sizes(),
                               "; fix: choose the loss by model.output, or another model.loss"));
  }
  return loss.reshape(at::IntArrayRef{});
}

at::Tensor class_scores(const c10::IValue& outputs, const std::string& name, int64_t num_classes) {
  const auto scores = select_output(outputs, name);
  if (scores.dim() != 2) {
    throw SettingsError(
        concat("model.loss=cross_entropy needs an output [images, classes], but it is ",
               scores.sizes(), "; fix: choose another output by model.output, or another loss"));
  }
  if (scores.size(1) < num_classes) {
    throw ddp::DataError(concat("the data has ", num_classes, " classes, but the output of ",
                                "model.path has ", scores.size(1),
                                "; fix: export a model for these classes"));
  }
  return scores;
}

}  // namespace examples
