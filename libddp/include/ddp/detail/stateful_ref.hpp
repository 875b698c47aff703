// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <string>
#include <type_traits>

#include "ddp/core/state_dict.hpp"
#include "ddp/detail/describe.hpp"

namespace ddp {

/// An object of a Checkpointer: a Stateful object, a smart pointer to one (SettingsError if it is
/// empty), or a name and one of these.
class StatefulRef {
 public:
  template <typename T>
  requires(!std::same_as<std::remove_cvref_t<T>, StatefulRef>) StatefulRef(T&& object)
      : StatefulRef("", address_of<T>(object)) {}
  StatefulRef(const std::string& name, StatefulRef object) : StatefulRef(name, object.object_) {}

  Stateful& get() const { return *object_; }
  /// The object's name in a checkpoint: the name given here, else state_name().
  std::string name() const { return name_.empty() ? object_->state_name() : name_; }

 private:
  StatefulRef(const std::string& name, Stateful* object);
  // T as deduced for T&&: a reference for variables.
  template <typename T>
  static Stateful* address_of(std::remove_reference_t<T>& object) {
    using Object = std::remove_reference_t<T>;
    constexpr bool is_object = std::derived_from<Object, Stateful>;
    constexpr bool is_pointer = requires {
      static_cast<Stateful*>(object.get());
    };
    static_assert(is_object || is_pointer,
                  "a Checkpointer stores objects of classes derived from ddp::Stateful, pointers "
                  "to them, and {name, object}: list the wrapped model, not its module");
    constexpr bool is_kept =
        std::is_lvalue_reference_v<T> && (is_pointer || !std::is_const_v<Object>);
    static_assert(is_kept || !(is_object || is_pointer),
                  "a Checkpointer uses the object until it ends: keep the object in a variable "
                  "that is not const");
    if constexpr (is_object && is_kept) {
      return &object;
    } else if constexpr (is_pointer) {
      return object.get();
    }
    return nullptr;
  }

  Stateful* object_;
  std::string name_;
};

}  // namespace ddp
