// SPDX-License-Identifier: Apache-2.0
// ExportedModule: a model that Python exported with torch.export, trained in C++.
//
//   Python:  torch.export.save(torch.export.export(net.train(), (x,), dynamic_shapes=…), "net.pt2")
//
//   ddp::ExportedModule module("net.pt2");
//   ddp::DistributedDataParallel model(module, ctx.communicator());
//   auto loss = torch::mse_loss(model.forward(x).toTensor(), y);
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/core/safetensors.hpp"
#include "ddp/ops/linear_owner.hpp"

namespace ddp {
namespace detail {
struct ExportedProgram;
}  // namespace detail

/// Inputs have sizes that the export does not allow.
struct InputSizeError : SettingsError {
  using SettingsError::SettingsError;
};

/// A call lacks an argument of the exported module.
struct MissingArgumentError : SettingsError {
  using SettingsError::SettingsError;
};

/// How an archive is opened.
struct ExportedModuleOptions {
  /// Shared objects that register custom operators. They are loaded first.
  std::vector<std::string> libraries = {};
  /// Activation checkpointing: patterns of the shell for paths of Python's modules ("layers.*").
  /// Activations of a module that matches are not kept; the backward computes them again, with the
  /// same random numbers. Matching modules inside of a matching module are part of its block. `*`
  /// also matches dots; alone it makes one block of each top-level module. A block that changes
  /// values from outside, other than buffers, or whose results share memory, keeps its activations,
  /// and this is logged. torch::autograd::grad() throws.
  std::vector<std::string> checkpoint_blocks = {};
  /// Runs chains of operators as ops of ddp::ops, which have kernels for CUDA. On the CPU the
  /// numbers stay. On CUDA they differ by rounding, dropout draws other numbers, strides of results
  /// may differ, a label outside the vocabulary gives NaN instead of an error, and the backward
  /// cannot be differentiated again. While an operator is overridden, nothing is replaced.
  bool fuse = true;
};

/// Runs the exported operators through LibTorch's dispatcher, so autograd records them,
/// autocast casts their inputs and CUDA graphs capture them. Parameters and buffers have Python's
/// names and order; a tied parameter is listed once, under its first name. Submodules hold the
/// parameters; they have no forward.
///
/// Mode. The module begins in the mode of the export. train() and eval() use the program of that
/// mode if the archive has both ("model" and "eval"). Else they change the mode of the exported
/// operators: dropout, normalization, attention, recurrent layers. Code that Python ran only
/// `if self.training` is not in the archive: export both modes then. eval() refuses a training
/// program with random operators, because it cannot know whether they belong to training only.
///
/// Devices in the program follow the module. So do regions of torch.autocast() for the device of
/// the export; those for another device have an effect only there. Control flow of Python is as it
/// was at the export.
///
/// Adapters. models::add_lora(*module, options) adds adapters to the linear layers, which have
/// Python's names; PEFT's files and merge_lora() work too. Add them before the module is wrapped:
/// the submodules become other objects.
class ExportedModuleImpl : public torch::nn::Module, public ops::LinearOwner {
 public:
  /// Reads the archive at `path`. Nothing in it is unpickled. Throws ReadError for a file that is
  /// no archive, DataError for one that this library cannot run; the message names the node and its
  /// line of Python. Throws SettingsError for a library that does not load, and for a pattern of
  /// checkpoint_blocks that matches nothing.
  explicit ExportedModuleImpl(const std::string& path, const ExportedModuleOptions& options = {});
  ~ExportedModuleImpl() override;

  /// Python's forward. Lists, tuples and dicts are IValues of the same structure as at the export.
  /// A named tuple or a dataclass is a dict of its fields. All keys are texts: 1 is "1". So is the
  /// result. An argument that was None or a number at the export keeps its value and may be left
  /// out. Throws SettingsError for another structure, and for a program of run_decompositions()
  /// that writes a parameter that is trained; MissingArgumentError for an argument that may not be
  /// left out; InputSizeError for sizes outside of the export's ranges or against one of its
  /// conditions.
  c10::IValue forward(std::vector<c10::IValue> positional,
                      const std::map<std::string, c10::IValue>& keywords = {});
  /// The same with all arguments by name.
  c10::IValue forward(const std::map<std::string, c10::IValue>& keywords) {
    return forward(std::vector<c10::IValue>(), keywords);
  }
  /// The same with all arguments by position: tensors, numbers, or IValues.
  template <typename... Inputs>
  requires(std::is_constructible_v<c10::IValue, Inputs>&&...) c10::IValue
      forward(Inputs&&... inputs) {
    return forward(std::vector<c10::IValue>{c10::IValue(std::forward<Inputs>(inputs))...});
  }

  /// Throws what forward() would throw for the structure and the sizes of these arguments in the
  /// module's mode. Runs nothing.
  void check_call(const std::vector<c10::IValue>& positional,
                  const std::map<std::string, c10::IValue>& keywords = {}) const;

  /// Throws SettingsError if the archive does not have this mode.
  void train(bool on = true) override;

  /// As in Python, only floating-point and complex tensors take a dtype. Throws SettingsError if
  /// the program names dtypes or has constants of another one, which the export fixed: export in
  /// `dtype` then, or use autocast. A call that throws leaves the module as it was.
  void to(at::Device device, bool non_blocking = false) override;
  void to(at::Device device, at::ScalarType dtype, bool non_blocking = false) override;
  void to(at::ScalarType dtype, bool non_blocking = false) override;

  /// A copy with its own parameters and buffers. Tied parameters stay tied.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;

  /// Python's state_dict(): tied parameters under each of their names, no buffers that are not
  /// persistent. The tensors share the module's memory.
  TensorMap state_dict() const;

  /// Writes an archive with the present parameters and persistent buffers, in the dtypes of the
  /// archive that the module was read from, in all its programs; that file must still be there.
  /// Frozen parameters stay frozen. Python's torch.export.load() opens it. `path` is the old or the
  /// new file, never a part. Throws WriteError, ReadError or DataError if the file that the module
  /// was read from is gone or has other tensors, and SettingsError if the module has adapters,
  /// which an archive does not hold.
  void save_archive(const std::string& path) const;

  /// Calls `function` in place of every operator `name` ("aten::batch_norm") of the program. It
  /// takes the arguments of the operator's schema from the stack and leaves the results. Its second
  /// argument says whether the module trains. An overload is a part of the name
  /// ("aten::add.Tensor"). Returns has_operator().
  bool override_operator(const std::string& name,
                         std::function<void(std::vector<c10::IValue>&, bool is_training)> function);
  bool has_operator(const std::string& name) const;  ///< in the program of any mode
  bool overrides(const std::string& name) const;     ///< whether override_operator() was called

  /// The modules of Python whose parameter `weight` is the weight of torch.ops.aten.linear.default.
  std::vector<ops::LinearLayer> linears() const override;
  /// Throws SettingsError for a layer that linears() lacks, that has an adapter, or whose lora_a or
  /// lora_b has another shape.
  void add_adapters(const std::vector<ops::LinearLayer>& layers) override;
  void remove_adapters() override;

  void pretty_print(std::ostream& stream) const override;  ///< one line, with the archive's path

 private:
  struct State;
  explicit ExportedModuleImpl(std::unique_ptr<State> state);
  void register_tensors();
  void replace_state(std::unique_ptr<State> state);
  void move(std::optional<at::Device> device, std::optional<at::ScalarType> dtype);
  std::vector<c10::IValue> write_mutations(const detail::ExportedProgram& program,
                                           const std::vector<c10::IValue>& outputs);
  std::vector<c10::IValue> bind_inputs(std::vector<c10::IValue> leaves, at::Device device) const;
  at::Device device_of(const std::vector<c10::IValue>& leaves) const;
  void check_dtype(at::ScalarType dtype) const;

  std::unique_ptr<State> state_;
};

TORCH_MODULE(ExportedModule);

}  // namespace ddp
