// SPDX-License-Identifier: Apache-2.0
#include "ddp/export/exported_module.hpp"

#include <torch/nn/module.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/detail/files.hpp"
#include "ddp/detail/model_weights.hpp"
#include "export/adapters.hpp"
#include "export/fixed_dtype.hpp"
#include "export/module_tree.hpp"
#include "export/operator_libraries.hpp"
#include "export/programs.hpp"
#include "export/recurrent_weights.hpp"
#include "export/shared_memory.hpp"

namespace ddp {

using detail::ExportedProgram;
using detail::InputKind;
using detail::OutputKind;
using detail::printable;

struct ExportedModuleImpl::State {
  struct Adapter {
    double alpha, dropout;
  };

  std::string archive;                               // its absolute path
  std::shared_ptr<const detail::Programs> exported;  // as the archive has them
  std::shared_ptr<const detail::Programs> programs;  // with adapters, if any
  TensorMap tensors;                           // parameters and buffers by all of Python's names
  std::map<std::string, TensorMap> constants;  // by the name of their program
  std::shared_ptr<const detail::OperatorOverrides> overrides;  // null: none
  std::map<std::string, Adapter> adapters;                     // by layer
  bool fuse = true;

  const detail::ModeProgram& program(bool is_training) const {
    return programs->of_mode(is_training, fuse && !overrides);
  }

  // A program may write its constants.
  std::map<std::string, TensorMap> copied_constants(std::optional<at::Device> device) const {
    return detail::copies_by_program(constants, exported->main_name(), device);
  }
};

namespace {

// Buffers that are not persistent are among the constants of the archive.
TensorMap state_tensors(const ExportedProgram& program, const TensorMap& weights,
                        const TensorMap& constants) {
  TensorMap tensors;
  for (const auto& input : program.inputs) {
    if (!input.is_state()) {
      continue;
    }
    const auto& source = input.is_persistent ? weights : constants;
    const auto found = source.find(input.target);
    if (found == source.end()) {
      throw DataError("the weights lack " + printable(input.target));
    }
    tensors.emplace(input.target, found->second);
  }
  return tensors;
}

void check_constants(const ExportedProgram& program, const TensorMap& constants) {
  for (const auto& input : program.inputs) {
    if (input.kind == InputKind::TensorConstant && constants.count(input.target) == 0) {
      throw DataError("the constants lack " + printable(input.target));
    }
  }
}

// The value of a tensor that write_mutations() overwrites, because the backward may need it. Python
// writes a parameter without a gradient, which the program of run_decompositions() does not say.
at::Tensor old_value(const detail::InputSpec& input, const at::Tensor& tensor) {
  if (tensor.requires_grad() && at::GradMode::is_enabled()) {
    throw SettingsError(concat("the program returns a new value of the parameter ",
                               printable(input.target),
                               ", so its gradients would differ from Python's; fix: export without "
                               "run_decompositions()"));
  }
  return tensor.clone();
}

std::string with_path(const std::string& path, const std::string& message) {
  return message.find(path) == std::string::npos ? concat(path, ": ", message) : message;
}

using NamedTensors = std::vector<detail::NamedTensor>;

// Parameters and buffers, each under its first name.
std::pair<NamedTensors, NamedTensors> named_tensors(const ExportedProgram& program,
                                                    const TensorMap& tensors) {
  std::pair<NamedTensors, NamedTensors> named;
  std::set<const at::TensorImpl*> seen;
  for (const auto& input : program.inputs) {
    if (input.is_state()) {
      const auto& tensor = tensors.at(input.target);
      if (seen.insert(tensor.unsafeGetTensorImpl()).second) {
        (input.kind == InputKind::Parameter ? named.first : named.second)
            .push_back({input.target, tensor});
      }
    }
  }
  return named;
}

// Fusion moves reads of parameters and buffers across writes of others.
bool may_fuse(const TensorMap& tensors, const std::string& path) {
  const auto view = detail::first_view(tensors);
  if (!view.empty()) {
    log_info(concat(path, ": nothing is fused, because ", printable(view),
                    " shares its memory with another tensor"));
  }
  return view.empty();
}

}  // namespace

ExportedModuleImpl::ExportedModuleImpl(const std::string& path,
                                       const ExportedModuleOptions& options)
    : torch::nn::Module("ExportedModule"), state_(std::make_unique<State>()) {
  detail::load_operator_libraries(options.libraries);
  detail::Pt2Archive archive(path);
  state_->archive = std::filesystem::absolute(path).string();
  try {
    const auto programs =
        std::make_shared<const detail::Programs>(archive, options.checkpoint_blocks);
    const auto& main = programs->main();
    state_->exported = state_->programs = programs;
    state_->constants[programs->main_name()] = archive.constants(programs->main_name());
    const auto& constants = state_->constants[programs->main_name()];
    check_constants(main, constants);
    if (programs->eval_program()) {
      state_->constants["eval"] = archive.constants("eval");
      detail::share_tensors(constants, state_->constants["eval"]);
      check_constants(*programs->eval_program(), state_->constants["eval"]);
    }
    auto weights = archive.weights(programs->main_name());
    state_->tensors = state_tensors(main, weights, constants);
    state_->tensors.merge(weights);  // a strict export has no inputs for what no node reads
    detail::tie_names(main, state_->tensors);
    state_->fuse = options.fuse && may_fuse(state_->tensors, path);
    programs->of_mode(programs->is_training(), state_->fuse);  // a fault of the archive shows now
    if (programs->eval_program()) {
      programs->of_mode(false, state_->fuse);
    }
    register_tensors();
  } catch (const nlohmann::json::exception& error) {
    throw DataError(concat(path, " is damaged: ", printable(error.what())));
  } catch (const c10::Error& error) {
    throw DataError(concat(path, " is damaged: ", error.what_without_backtrace()));
  } catch (const DataError& error) {
    throw DataError(with_path(path, error.what()));
  } catch (const ReadError& error) {
    throw ReadError(with_path(path, error.what()));
  }
  torch::nn::Module::train(state_->programs->is_training());
}

ExportedModuleImpl::ExportedModuleImpl(std::unique_ptr<State> state)
    : torch::nn::Module("ExportedModule"), state_(std::move(state)) {
  register_tensors();
}

ExportedModuleImpl::~ExportedModuleImpl() = default;

void ExportedModuleImpl::register_tensors() {
  const auto [parameters, buffers] = named_tensors(state_->programs->main(), state_->tensors);
  detail::register_tree(*this, parameters, buffers);
}

at::Device ExportedModuleImpl::device_of(const std::vector<c10::IValue>& leaves) const {
  if (!state_->tensors.empty()) {
    return state_->tensors.begin()->second.device();
  }
  const auto is_tensor = [](const c10::IValue& leaf) { return leaf.isTensor(); };
  const auto found = std::find_if(leaves.begin(), leaves.end(), is_tensor);
  return found == leaves.end() ? at::Device(at::kCPU) : found->toTensor().device();
}

std::vector<c10::IValue> ExportedModuleImpl::bind_inputs(std::vector<c10::IValue> leaves,
                                                         at::Device device) const {
  const auto& mode = state_->program(is_training());
  std::vector<c10::IValue> inputs;
  std::size_t next_leaf = 0;
  for (const auto& input : mode.program.inputs) {
    if (input.is_state()) {
      const auto& tensor = state_->tensors.at(input.target);
      inputs.emplace_back(mode.rewritten.count(input.target) != 0 ? old_value(input, tensor)
                                                                  : tensor);
    } else if (input.kind == InputKind::TensorConstant) {
      const auto& constant = state_->constants.at(mode.constants_of).at(input.target);
      inputs.emplace_back(constant.device() == device ? constant : constant.to(device));
    } else {
      inputs.push_back(std::move(leaves[next_leaf++]));
    }
  }
  mode.shapes.check(inputs);
  mode.guards.check(inputs);
  return inputs;
}

void ExportedModuleImpl::check_call(const std::vector<c10::IValue>& positional,
                                    const std::map<std::string, c10::IValue>& keywords) const {
  const auto& mode = state_->program(is_training());
  const auto leaves = mode.arguments.flat(positional, keywords);
  bind_inputs(leaves, device_of(leaves));
}

c10::IValue ExportedModuleImpl::forward(std::vector<c10::IValue> positional,
                                        const std::map<std::string, c10::IValue>& keywords) {
  const auto& mode = state_->program(is_training());
  auto leaves = mode.arguments.flat(std::exchange(positional, {}), keywords);
  const detail::CallContext context{.device = device_of(leaves),
                                    .export_device = mode.program.device,
                                    .is_training = is_training(),
                                    .overrides = state_->overrides};
  auto inputs = bind_inputs(std::move(leaves), context.device);
  const auto other_dtypes = mode.shapes.other_dtypes(inputs);
  const auto outputs = [&] {
    try {
      return mode.plan.run(std::move(inputs), context);
    } catch (c10::Error& error) {
      if (!other_dtypes.empty()) {
        error.add_context(other_dtypes);
      }
      throw;
    }
  }();
  return detail::unflatten(mode.program.out_spec, write_mutations(mode.program, outputs));
}

// A functional program returns the new values of buffers instead of writing them. As in Python, a
// result that is such a value is the buffer.
std::vector<c10::IValue> ExportedModuleImpl::write_mutations(
    const ExportedProgram& program, const std::vector<c10::IValue>& outputs) {
  std::map<std::string, at::Tensor> written;  // by the name of the new value
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto& [kind, target] = program.outputs[i];
    if (kind != OutputKind::User) {
      const torch::NoGradGuard no_grad;
      auto& tensor = state_->tensors.at(target);
      tensor.copy_(outputs[i].toTensor());
      if (const auto* name = program.graph.outputs[i].name()) {
        written.emplace(name->name, tensor);
      }
    }
  }
  std::vector<c10::IValue> results;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (program.outputs[i].kind == OutputKind::User) {
      const auto* name = program.graph.outputs[i].name();
      const auto found = name ? written.find(name->name) : written.end();
      results.push_back(found == written.end() ? outputs[i] : c10::IValue(found->second));
    }
  }
  return results;
}

void ExportedModuleImpl::train(bool on) {
  state_->programs->of_mode(on);
  torch::nn::Module::train(on);
}

void ExportedModuleImpl::check_dtype(at::ScalarType dtype) const {
  if (!at::isFloatingType(dtype)) {
    return;  // LibTorch's own message
  }
  const auto changes = [&](const auto& entry) {
    return entry.second.is_floating_point() && entry.second.scalar_type() != dtype;
  };
  const auto& tensors = state_->tensors;
  const auto changed = std::find_if(tensors.begin(), tensors.end(), changes);
  if (changed == tensors.end()) {
    return;
  }
  const auto& programs = *state_->programs;
  const auto refuse = [&](const ExportedProgram& program, const std::string& name) {
    const auto obstacle = detail::fixed_dtype(program, state_->constants.at(name), dtype);
    if (!obstacle.empty()) {
      throw SettingsError(concat(programs.path(), " was exported in ",
                                 changed->second.scalar_type(), ", and its ", obstacle,
                                 "; fix: export the model in ", dtype,
                                 " (tools/export_model.py --dtype), or use autocast"));
    }
  };
  refuse(programs.main(), programs.main_name());
  if (programs.eval_program()) {
    refuse(*programs.eval_program(), "eval");
  }
}

void ExportedModuleImpl::move(std::optional<at::Device> device,
                              std::optional<at::ScalarType> dtype) {
  if (dtype) {
    check_dtype(*dtype);
  }
  const auto copies = detail::copies_of(state_->tensors, device, dtype);
  auto constants = device ? state_->copied_constants(device) : state_->constants;
  std::map<const at::TensorImpl*, at::Tensor> gradients;
  for (const auto& [name, tensor] : state_->tensors) {
    if (tensor.grad().defined()) {
      const auto* original = tensor.unsafeGetTensorImpl();
      gradients[original] = tensor.grad().to(copies.at(original).options());
    }
  }
  // From here on nothing is allocated.
  std::set<const at::TensorImpl*> moved;
  for (const auto& [name, tensor] : state_->tensors) {
    const auto* original = tensor.unsafeGetTensorImpl();
    if (!moved.insert(original).second) {
      continue;  // under another name
    }
    if (const auto gradient = gradients.find(original); gradient != gradients.end()) {
      tensor.mutable_grad() = gradient->second;
    }
    tensor.set_data(copies.at(original));
  }
  state_->constants = std::move(constants);
  detail::join_recurrent_weights(state_->programs->main(), state_->tensors);
}

void ExportedModuleImpl::to(at::Device device, at::ScalarType dtype, bool) {
  move(device, dtype);
}

void ExportedModuleImpl::to(at::Device device, bool) {
  move(device, std::nullopt);
}

void ExportedModuleImpl::to(at::ScalarType dtype, bool) {
  move(std::nullopt, dtype);
}

std::shared_ptr<torch::nn::Module> ExportedModuleImpl::clone(
    const std::optional<at::Device>& device) const {
  auto state = std::make_unique<State>(*state_);
  const auto copies = detail::copies_of(state_->tensors, device, std::nullopt);
  for (const auto& [name, tensor] : state_->tensors) {
    state->tensors.at(name) = copies.at(tensor.unsafeGetTensorImpl());
  }
  state->constants = state_->copied_constants(device);
  const std::shared_ptr<ExportedModuleImpl> copy(new ExportedModuleImpl(std::move(state)));
  detail::join_recurrent_weights(state_->programs->main(), copy->state_->tensors);
  copy->torch::nn::Module::train(is_training());
  return copy;
}

TensorMap ExportedModuleImpl::state_dict() const {
  std::set<std::string> temporary;
  for (const auto& input : state_->programs->main().inputs) {
    if (!input.is_persistent) {
      temporary.insert(input.target);
    }
  }
  TensorMap state;
  for (const auto& [name, tensor] : state_->tensors) {
    if (temporary.count(name) == 0) {
      state.emplace(name, tensor.detach());
    }
  }
  return state;
}

void ExportedModuleImpl::save_archive(const std::string& path) const {
  if (!state_->adapters.empty()) {
    throw SettingsError(concat("save_archive: the module has an adapter at ",
                               printable(state_->adapters.begin()->first),
                               ", which an archive does not hold; fix: call models::merge_lora() "
                               "first, or save the adapter with models::save_adapter()"));
  }
  detail::Pt2Archive archive(state_->archive);
  std::vector<std::string> programs = {state_->programs->main_name()};
  if (state_->programs->eval_program()) {
    programs.emplace_back("eval");
  }
  const auto bytes = [&] {
    try {
      return archive.with_weights(programs, state_->tensors);
    } catch (const nlohmann::json::exception& error) {
      throw DataError(concat(state_->archive, " is damaged: ", printable(error.what())));
    }
  }();
  replace_file(system_file_ops(), path, {bytes});
}

bool ExportedModuleImpl::override_operator(
    const std::string& name, std::function<void(std::vector<c10::IValue>&, bool)> function) {
  if (state_->fuse && !state_->overrides) {
    log_info(
        concat(state_->archive, ": nothing is fused, because ", printable(name), " is overridden"));
  }
  auto overrides = state_->overrides ? *state_->overrides : detail::OperatorOverrides();
  overrides[name] = std::move(function);
  state_->overrides = std::make_shared<const detail::OperatorOverrides>(std::move(overrides));
  ops::invalidate_graphs();
  return has_operator(name);
}

bool ExportedModuleImpl::has_operator(const std::string& name) const {
  const auto& eval = state_->programs->eval_program();
  return detail::has_operator(state_->programs->main().graph, name) ||
         (eval && detail::has_operator(eval->graph, name));
}

bool ExportedModuleImpl::overrides(const std::string& name) const {
  return state_->overrides != nullptr && state_->overrides->count(name) != 0;
}

std::vector<ops::LinearLayer> ExportedModuleImpl::linears() const {
  std::vector<ops::LinearLayer> layers;
  for (const auto& linear : detail::find_linears(state_->exported->main(), state_->tensors)) {
    ops::LinearLayer layer{.name = linear.layer,
                           .weight = state_->tensors.at(*linear.weights.begin()),
                           .shares_weight = linear.has_other_uses};
    const auto adapter = state_->adapters.find(linear.layer);
    if (adapter != state_->adapters.end()) {
      layer.lora_a = state_->tensors.at(detail::lora_a_name(linear.layer));
      layer.lora_b = state_->tensors.at(detail::lora_b_name(linear.layer));
      layer.lora_alpha = adapter->second.alpha;
      layer.lora_dropout = adapter->second.dropout;
    }
    layers.push_back(std::move(layer));
  }
  return layers;
}

void ExportedModuleImpl::add_adapters(const std::vector<ops::LinearLayer>& layers) {
  const auto known = linears();
  auto state = std::make_unique<State>(*state_);
  for (const auto& layer : layers) {
    detail::check_adapter(layer, known, state->tensors);
    state->tensors[detail::lora_a_name(layer.name)] = layer.lora_a;
    state->tensors[detail::lora_b_name(layer.name)] = layer.lora_b;
    state->adapters[layer.name] = {layer.lora_alpha, layer.lora_dropout};
  }
  std::vector<detail::ProgramAdapter> adapters;
  for (auto& linear : detail::find_linears(state->exported->main(), state->tensors)) {
    const auto found = state->adapters.find(linear.layer);
    if (found != state->adapters.end()) {
      const auto rank = state->tensors.at(detail::lora_a_name(linear.layer)).size(0);
      adapters.push_back({.linear = std::move(linear),
                          .scale = found->second.alpha / static_cast<double>(rank),
                          .dropout = found->second.dropout});
    }
  }
  state->programs = std::make_shared<const detail::Programs>(
      state->exported, [&](ExportedProgram& program, bool training) {
        detail::add_adapters(program, adapters, training);
      });
  replace_state(std::move(state));
}

void ExportedModuleImpl::remove_adapters() {
  auto state = std::make_unique<State>(*state_);
  for (const auto& [layer, adapter] : state->adapters) {
    state->tensors.erase(detail::lora_a_name(layer));
    state->tensors.erase(detail::lora_b_name(layer));
  }
  state->adapters.clear();
  state->programs = state->exported;
  replace_state(std::move(state));
}

void ExportedModuleImpl::replace_state(std::unique_ptr<State> state) {
  state->programs->of_mode(is_training());  // its errors leave the module as it was
  const auto [parameters, buffers] = named_tensors(state->programs->main(), state->tensors);
  detail::replace_children(*this, parameters, buffers);
  state_ = std::move(state);
  torch::nn::Module::train(is_training());  // the new children too
  ops::invalidate_graphs();
}

void ExportedModuleImpl::pretty_print(std::ostream& stream) const {
  stream << "ddp::ExportedModule(" << state_->programs->path() << ')';
}

}  // namespace ddp
