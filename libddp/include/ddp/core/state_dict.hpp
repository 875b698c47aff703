// SPDX-License-Identifier: Apache-2.0
// Named tensors: a model's parameters, and what a checkpoint stores of an object.
#pragma once

#include <ATen/core/Tensor.h>

#include <compare>
#include <cstdint>
#include <iosfwd>
#include <map>
#include <string>
#include <variant>
#include <vector>

namespace ddp {

/// A parameter or buffer and its dotted name, as in torch::nn::Module::named_parameters.
struct NamedParameter {
  std::string name;   ///< "layer1.0.conv1.weight"
  at::Tensor tensor;  ///< shares the module's memory
};
using NamedParameters = std::vector<NamedParameter>;  ///< in registration order

/// 16 hexadecimal digits (XXH3) over names, dtypes, shapes and every bit of the values. The host
/// waits for the device; device memory is copied in pieces.
std::string fingerprint_of(const NamedParameters& parameters);

using StateValue = std::variant<bool, int64_t, double, std::string>;  ///< an entry without tensor

/// Names a tensor of an object's state: a parameter, buffer or other tensor of the object, or one
/// slot that an optimizer keeps of a parameter.
struct StateKey {
  std::string parameter;  ///< "layer1.0.conv1.weight", or the object's own name of a tensor
  std::string slot;       ///< "exp_avg", "master", "step"; empty: the parameter or tensor itself

  /// The key of a text: state.PARAMETER.SLOT is a slot's, all others are tensors' names.
  StateKey(const std::string& text);                            // NOLINT: a text is a key
  StateKey(const char* text) : StateKey(std::string(text)) {}   ///< the same
  StateKey(std::string parameter_name, std::string slot_name);  ///< `slot_name` has no dot
  std::string text() const;  ///< as in files and messages; StateKey(key.text()) == key
  auto operator<=>(const StateKey&) const = default;  ///< by parameter, then slot
  friend std::ostream& operator<<(std::ostream& stream, const StateKey& key);  ///< its text
};

/// Elements [begin, begin + numel) of a whole tensor, in the order of the whole tensor's memory.
struct StateSlice {
  std::vector<int64_t> sizes;                          ///< of the whole tensor
  std::vector<int64_t> strides;                        ///< of the whole tensor, which is dense
  int64_t begin = 0;                                   ///< first element
  bool operator==(const StateSlice&) const = default;  ///< the same elements
};

/// What a rank holds of a tensor that is divided between ranks.
struct StatePart {
  StateSlice slice;   ///< which elements
  at::Tensor tensor;  ///< 1-D
};

/// What one object saves: entries by key.
struct StateDict {
  std::map<StateKey, at::Tensor> tensors;    ///< on any device; whole
  std::map<std::string, StateValue> values;  ///< counters and settings
  /// Divided tensors. state_dict() gives this rank's parts, load_state_dict() takes those of any
  /// number of ranks.
  std::map<StateKey, std::vector<StatePart>> parts = {};

  /// Whether there is such a tensor, whole or divided.
  bool contains(const StateKey& key) const { return tensors.contains(key) || parts.contains(key); }
  /// The sizes of a whole or divided tensor, which must exist.
  at::IntArrayRef sizes(const StateKey& key) const;
  /// Throws MismatchError if an element of a divided tensor is in none of its parts.
  void require_all_parts(const StateKey& key) const;
  /// The tensor, joined from its parts on the host if it is divided. Throws as require_all_parts().
  at::Tensor whole(const StateKey& key) const;
  /// Elements [begin, begin + numel), 1-D, in the memory order of `like`, which has the tensor's
  /// sizes. Reads no others if the parts have this order. Throws MismatchError if one is missing.
  at::Tensor slice(const StateKey& key, const at::Tensor& like, int64_t begin, int64_t numel) const;
};

/// The key of a tensor that a Checkpointer saves for each rank, not for rank 0 alone.
inline constexpr const char* kRankLocalPrefix = "rank_local.";

/// Any object a Checkpointer can store: model, optimizer, scaler, loader, or a user's own.
class Stateful {
 public:
  virtual ~Stateful() = default;
  /// Names the object's entries: "model", "optimizer", … Unique per object.
  virtual std::string state_name() const = 0;
  /// Tensors may alias live memory: copy them to keep the result beyond the step.
  /// Of `tensors`, each rank's is saved if the key starts with kRankLocalPrefix, else rank 0's. Of
  /// `parts`, each rank's are saved.
  virtual StateDict state_dict() const = 0;
  /// Throws MismatchError naming the first key that is missing, unexpected or of another shape; the
  /// object is then unchanged.
  virtual void load_state_dict(const StateDict& state) = 0;
};

}  // namespace ddp
