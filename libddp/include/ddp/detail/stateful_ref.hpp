// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <string>

#include "ddp/core/state_dict.hpp"
#include "ddp/detail/describe.hpp"

namespace ddp {

/// An object of a Checkpointer: a Stateful object, a smart pointer to one (SettingsError if it is
/// empty), or a name and one of these.
class StatefulRef {
 public:
  StatefulRef(Stateful& object) : StatefulRef("", &object) {}
  template <typename Pointer>
  requires requires(Pointer& pointer) { static_cast<Stateful*>(pointer.get()); }
  StatefulRef(Pointer& pointer) : StatefulRef("", pointer.get()) {}
  template <typename T>
  requires(!std::derived_from<T, Stateful> && !requires(T & pointer) {
    static_cast<Stateful*>(pointer.get());
  }) StatefulRef(const T&) {
    static_assert(
        detail::always_false<T>,
        "a Checkpointer stores objects of classes derived from ddp::Stateful, pointers to "
        "them, and {name, object}: list the wrapped model, not its module");
  }
  StatefulRef(const std::string& name, StatefulRef object) : StatefulRef(name, object.object_) {}

  Stateful& get() const { return *object_; }
  /// The object's name in a checkpoint: the name given here, else state_name().
  std::string name() const { return name_.empty() ? object_->state_name() : name_; }

 private:
  StatefulRef(const std::string& name, Stateful* object);

  Stateful* object_;
  std::string name_;
};

}  // namespace ddp
