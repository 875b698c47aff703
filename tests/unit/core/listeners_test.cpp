// SPDX-License-Identifier: Apache-2.0
#include "core/listeners.hpp"

#include <memory>
#include <string>

#include "support/catch.hpp"

using ddp::detail::Listeners;

namespace {

struct Recorded {
  Listeners::Token add(const std::string& name) {
    return listeners->add([this, name] { calls += name; });
  }
  std::string notify() {
    calls.clear();
    listeners->notify();
    return calls;
  }

  std::unique_ptr<Listeners> listeners = std::make_unique<Listeners>();
  std::string calls;
};

}  // namespace

TEST_CASE("a listener is called as long as its token lives") {
  Recorded recorded;
  CHECK(recorded.notify().empty());
  auto a = recorded.add("a");
  const auto b = recorded.add("b");
  CHECK(recorded.notify() == "ab");
  CHECK(recorded.notify() == "ab");
  a = nullptr;
  CHECK(recorded.notify() == "b");
  a = recorded.add("A");
  CHECK(recorded.notify() == "bA");
}

TEST_CASE("a token may outlive what its listener listens to") {
  Recorded recorded;
  auto token = recorded.add("a");
  recorded.listeners = nullptr;
  token = nullptr;
  CHECK(recorded.calls.empty());
}

TEST_CASE("a listener may end itself and others, and add new ones") {
  Recorded recorded;
  Listeners::Token first, second, added;
  first = recorded.listeners->add([&] {
    recorded.calls += "first";
    added = recorded.add("added");
    second = nullptr;
    first = nullptr;
  });
  second = recorded.add("second");
  CHECK(recorded.notify() == "first");
  CHECK(recorded.notify() == "added");
}
