// SPDX-License-Identifier: Apache-2.0
// The agreed order of launches: all ranks launch in the same order, whatever order buckets become
// ready in.
#include "comm/launch_sequencer.hpp"

#include <algorithm>
#include <atomic>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/catch.hpp"

using ddp::LaunchSequencer;

namespace {

// Two models; the log records launches and ends as "a0", "b1", "a end".
struct Models {
  LaunchSequencer sequencer;
  LaunchSequencer::ModelId a = sequencer.register_model();
  LaunchSequencer::ModelId b = sequencer.register_model();
  std::vector<std::string> log;

  void begin(LaunchSequencer::ModelId model, int num_buckets) {
    const std::string name = model == a ? "a" : "b";
    sequencer.begin_pass(
        model, num_buckets,
        [this, name](int bucket) { log.push_back(name + std::to_string(bucket)); },
        [this, name] { log.push_back(name + " end"); });
  }
};
using Log = std::vector<std::string>;

}  // namespace

TEST_CASE("buckets of one model are launched in their order, as early as it allows") {
  Models m;
  m.begin(m.a, 3);
  m.sequencer.bucket_ready(m.a, 1);
  CHECK(m.log.empty());
  m.sequencer.bucket_ready(m.a, 0);
  CHECK(m.log == Log{"a0", "a1"});
  m.sequencer.bucket_ready(m.a, 2);
  CHECK(m.log == Log{"a0", "a1", "a2"});
  m.sequencer.flush();
  CHECK(m.log.back() == "a end");
  m.sequencer.flush();  // nothing is pending
  CHECK(m.log.size() == 4);
}

TEST_CASE("the model whose forward ran last goes first, whichever is ready first") {
  for (const bool a_first : {true, false}) {
    Models m;
    m.begin(m.a, 2);
    m.begin(m.b, 2);
    for (const int bucket : {0, 1}) {
      m.sequencer.bucket_ready(a_first ? m.a : m.b, bucket);
    }
    for (const int bucket : {1, 0}) {
      m.sequencer.bucket_ready(a_first ? m.b : m.a, bucket);
    }
    m.sequencer.flush();
    CHECK(m.log == Log{"b0", "b1", "a0", "a1", "b end", "a end"});
  }
}

TEST_CASE("a model that takes no part in a backward stands aside at its end, and keeps its pass") {
  Models m;
  m.begin(m.a, 1);
  m.begin(m.b, 2);
  m.sequencer.bucket_ready(m.a, 0);
  CHECK(m.log.empty());  // b may still become ready
  m.sequencer.flush();
  CHECK(m.log == Log{"a0", "a end"});
  m.sequencer.bucket_ready(m.b, 0);
  m.sequencer.bucket_ready(m.b, 1);
  m.sequencer.flush();
  CHECK(m.log == Log{"a0", "a end", "b0", "b1", "b end"});
}

TEST_CASE("a pass that is begun anew or ended is forgotten with what was ready in it") {
  Models m;
  m.begin(m.a, 2);
  m.sequencer.bucket_ready(m.a, 1);
  m.begin(m.a, 2);
  m.sequencer.bucket_ready(m.a, 0);
  CHECK(m.log == Log{"a0"});
  m.begin(m.b, 1);
  m.sequencer.end_pass(m.b);
  m.sequencer.bucket_ready(m.a, 1);
  CHECK(m.log == Log{"a0", "a1"});
  CHECK_THROWS(m.sequencer.bucket_ready(m.b, 0));
  CHECK_THROWS(m.sequencer.bucket_ready(m.a, 1));  // twice
}

TEST_CASE("the end of a pass may begin the next one") {
  LaunchSequencer sequencer;
  const auto model = sequencer.register_model();
  int ends = 0;
  std::function<void()> begin = [&] {
    sequencer.begin_pass(
        model, 1, [](int) {},
        [&] {
          if (++ends < 3) {
            begin();
          }
        });
  };
  begin();
  for (int pass = 0; pass < 3; ++pass) {
    sequencer.bucket_ready(model, 0);
    sequencer.flush();
  }
  CHECK(ends == 3);
}

TEST_CASE("all passes end although one throws, and the first exception is passed on") {
  LaunchSequencer sequencer;
  int num_ends = 0;
  for (int i = 0; i < 3; ++i) {
    const auto model = sequencer.register_model();
    sequencer.begin_pass(
        model, 1, [](int) {},
        [&] {
          if (++num_ends < 3) {
            throw std::runtime_error(std::to_string(num_ends));
          }
        });
    sequencer.bucket_ready(model, 0);
  }
  CHECK_THROWS_WITH(sequencer.flush(), "1");
  CHECK(num_ends == 3);
}

TEST_CASE("threads that race make no difference to the order") {
  constexpr int kBuckets = 40;
  for (unsigned seed = 0; seed < 20; ++seed) {
    Models m;
    m.begin(m.a, kBuckets);
    m.begin(m.b, kBuckets);
    std::vector<std::thread> threads;
    for (const auto model : {m.a, m.b}) {
      for (const int half : {0, 1}) {
        threads.emplace_back([&m, model, half, seed] {
          std::vector<int> mine;
          for (int bucket = half; bucket < kBuckets; bucket += 2) {
            mine.push_back(bucket);
          }
          std::shuffle(mine.begin(), mine.end(), std::mt19937(seed));
          for (const int bucket : mine) {
            m.sequencer.bucket_ready(model, bucket);
          }
        });
      }
    }
    for (auto& thread : threads) {
      thread.join();
    }
    m.sequencer.flush();
    Log expected;
    for (const char* name : {"b", "a"}) {
      for (int bucket = 0; bucket < kBuckets; ++bucket) {
        expected.push_back(name + std::to_string(bucket));
      }
    }
    expected.insert(expected.end(), {"b end", "a end"});
    REQUIRE(m.log == expected);
  }
}
