// SPDX-License-Identifier: Apache-2.0
#include "core/before_unwind.hpp"

#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "ddp/core/error.hpp"
#include "support/catch.hpp"

namespace ddp::detail {
namespace {

using Events = std::vector<std::string>;

class Noisy {
 public:
  explicit Noisy(Events& events) : events_(events) {}
  ~Noisy() { events_.push_back("destroyed"); }

 private:
  Events& events_;
};

template <typename F>
Events events_of(F&& body) {
  Events events;
  try {
    observe_before_unwind(
        [&] {
          Noisy outer(events);
          body(events);
        },
        [&](const std::exception* e) {
          events.push_back(std::string("seen ") + (e == nullptr ? "?" : e->what()));
        });
    events.push_back("returned");
  } catch (const std::exception& e) {
    events.push_back(std::string("caught ") + e.what());
  } catch (...) {
    events.push_back("caught ?");
  }
  return events;
}

}  // namespace

TEST_CASE("an exception is seen before the first destructor runs") {
  CHECK(events_of([](Events& events) {
          Noisy inner(events);
          throw DataError("shard 7");
        }) == Events{"seen shard 7", "destroyed", "destroyed", "caught shard 7"});
  CHECK(events_of([](Events&) { throw 7; }) == Events{"seen ?", "destroyed", "caught ?"});
  CHECK(events_of([](Events&) {
          std::string().at(1);  // thrown inside another library
        })
            .front()
            .rfind("seen basic_string::at", 0) == 0);
}

TEST_CASE("what is caught inside, or not thrown, is not seen") {
  CHECK(events_of([](Events&) {
          try {
            throw std::runtime_error("inside");
          } catch (const std::runtime_error&) {
          }
        }) == Events{"destroyed", "returned"});
  CHECK(events_of([](Events&) {
          try {
            throw std::runtime_error("first");
          } catch (const std::runtime_error&) {
            throw std::runtime_error("second");
          }
        }) == Events{"seen second", "destroyed", "caught second"});
  CHECK(events_of([](Events&) {
          try {
            throw std::runtime_error("again");
          } catch (...) {
            throw;
          }
        }) == Events{"seen again", "destroyed", "caught again"});
}

TEST_CASE("observers nest, and belong to their thread") {
  CHECK(events_of([](Events& events) {
          const Events inner = events_of([](Events&) { throw std::runtime_error("inner"); });
          events.insert(events.end(), inner.begin(), inner.end());
          throw std::runtime_error("outer");
        }) == Events{"seen inner", "destroyed", "caught inner", "seen outer", "destroyed",
                     "caught outer"});
  CHECK(events_of([](Events&) {
          std::thread([] {
            try {
              throw std::runtime_error("elsewhere");
            } catch (const std::runtime_error&) {
            }
          }).join();
        }) == Events{"destroyed", "returned"});
}

TEST_CASE("an observer that throws does not hide the first exception") {
  try {
    observe_before_unwind([] { throw DataError("first"); },
                          [](const std::exception*) { throw std::runtime_error("observer"); });
    FAIL("nothing was thrown");
  } catch (const DataError& error) {
    CHECK(std::string(error.what()) == "first");
  }
}

}  // namespace ddp::detail
