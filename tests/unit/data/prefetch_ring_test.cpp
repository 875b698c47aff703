// SPDX-License-Identifier: Apache-2.0
// Torch-free: also runs under the thread sanitizer.
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "data/loader/prefetch_ring.hpp"
#include "ddp/data/sample_rng.hpp"
#include "support/catch.hpp"
#include "unit/data/data_test_support.hpp"

using ddp::detail::PrefetchRing;
using ddp::detail::RingOptions;

namespace {

struct Payload {
  int64_t number = -1;
  std::vector<int64_t> items;
  bool finished = false;
};
using Ring = PrefetchRing<Payload>;

int64_t count_of(int64_t batch) {
  return 1 + batch * 7 % 40;
}
int64_t value_of(int64_t batch, int64_t item) {
  return batch * 1000 + item;
}

struct Counting {
  std::atomic<int64_t> planned{0};
  std::atomic<int64_t> in_plan{0};
  std::atomic<int64_t> finished{0};
};

Ring::Stages counting_stages(Counting& state, int64_t num_batches) {
  return {.plan = [&state, num_batches](Payload& p) -> std::optional<int64_t> {
            if (state.in_plan.fetch_add(1) != 0) {
              throw std::logic_error("plan called twice at once");
            }
            const int64_t number = state.planned.load();
            std::optional<int64_t> count;
            if (number < num_batches) {
              state.planned.store(number + 1);
              count = count_of(number);
              p.number = number;
              p.items.assign(static_cast<size_t>(*count), -1);
              p.finished = false;
            }
            state.in_plan.fetch_sub(1);
            return count;
          },
          .fill =
              [](Payload& p, int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) {
                  // Uneven work, so that later batches overtake earlier ones.
                  volatile uint32_t sink = 0;
                  ddp::SampleRng rng(1, static_cast<uint64_t>(p.number), static_cast<uint64_t>(i));
                  for (uint32_t spin = rng.below(2000); spin > 0; --spin) {
                    sink = sink + spin;
                  }
                  p.items[static_cast<size_t>(i)] += 1 + value_of(p.number, i);
                }
              },
          .finish =
              [&state](Payload& p) {
                p.finished = true;
                ++state.finished;
              }};
}

}  // namespace

TEST_CASE("batches come in order, complete and once, at any number of workers", "[ring]") {
  const int num_workers = GENERATE(0, 1, 2, 5);
  const int num_slots = GENERATE(1, 2, 4);
  const int64_t chunk = GENERATE(1, 16);
  Counting state;
  Ring ring({.num_slots = num_slots, .num_workers = num_workers, .chunk = chunk},
            counting_stages(state, 60));
  int64_t expected = 0;
  while (Payload* p = ring.acquire()) {
    REQUIRE(p->number == expected);
    REQUIRE(p->finished);
    REQUIRE(static_cast<int64_t>(p->items.size()) == count_of(expected));
    for (size_t i = 0; i < p->items.size(); ++i) {
      REQUIRE(p->items[i] == value_of(expected, static_cast<int64_t>(i)));
    }
    ring.release();
    ++expected;
  }
  REQUIRE(expected == 60);
  REQUIRE(state.finished == 60);
  REQUIRE(ring.acquire() == nullptr);
}

TEST_CASE("no more batches are prepared ahead than there are slots", "[ring]") {
  Counting state;
  Ring ring({.num_slots = 3, .num_workers = 2, .chunk = 4}, counting_stages(state, 1000));
  for (int64_t taken = 0; taken < 20; ++taken) {
    REQUIRE(ring.acquire() != nullptr);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    REQUIRE(state.planned <= taken + 3);  // the taken one occupies a slot
    ring.release();
  }
}

TEST_CASE("two batches may be held at once", "[ring]") {
  Counting state;
  Ring ring({.num_slots = 3, .num_workers = 2, .chunk = 4}, counting_stages(state, 50));
  Payload* previous = ring.acquire();
  for (int64_t number = 1; number < 50; ++number) {
    Payload* current = ring.acquire();
    REQUIRE(previous->number == number - 1);
    REQUIRE(previous->items[0] == value_of(number - 1, 0));
    REQUIRE(current->number == number);
    ring.release();
    previous = current;
  }
}

TEST_CASE("an error of a stage reaches the consumer in order", "[ring]") {
  const int num_workers = GENERATE(0, 1, 4);
  const std::string stage = GENERATE("plan", "fill", "finish");
  Counting state;
  auto stages = counting_stages(state, 100);
  if (stage == "plan") {
    stages.plan = [plan = stages.plan, &state](Payload& p) {
      return state.planned == 5 ? throw std::runtime_error("plan") : plan(p);
    };
  } else if (stage == "fill") {
    stages.fill = [fill = stages.fill](Payload& p, int64_t begin, int64_t end) {
      if (p.number == 5) {
        std::this_thread::sleep_for(std::chrono::microseconds(begin == 0 ? 500 : 0));
        throw std::runtime_error(begin == 0 ? "fill" : "a later item");
      }
      fill(p, begin, end);
    };
  } else {
    stages.finish = [finish = stages.finish](Payload& p) {
      return p.number == 5 ? throw std::runtime_error("finish") : finish(p);
    };
  }
  Ring ring({.num_slots = 3, .num_workers = num_workers, .chunk = 2}, stages);
  for (int64_t number = 0; number < 5; ++number) {
    REQUIRE(ring.acquire()->number == number);
    ring.release();
  }
  for (int i = 0; i < 3; ++i) {
    REQUIRE(data_test::message_of<std::runtime_error>([&] { ring.acquire(); }) == stage);
  }
}

TEST_CASE("a ring may be destroyed at any time", "[ring]") {
  for (int round = 0; round < 50; ++round) {
    Counting state;
    Ring ring({.num_slots = 4, .num_workers = 3, .chunk = 1}, counting_stages(state, 1000));
    for (int i = 0; i < round % 5; ++i) {
      ring.acquire();
      ring.release();
    }
  }
}

TEST_CASE("Philox gives the published numbers", "[rng]") {
  // Known answers of Random123's kat_vectors for philox4x32-10.
  auto zero = ddp::detail::philox4x32({{0, 0, 0, 0}}, 0);
  REQUIRE(zero.word[0] == 0x6627e8d5u);
  REQUIRE(zero.word[1] == 0xe169c58du);
  REQUIRE(zero.word[2] == 0xbc57ac4cu);
  REQUIRE(zero.word[3] == 0x9b00dbd8u);
  auto pi = ddp::detail::philox4x32({{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}},
                                    0x299f31d0a4093822u);
  REQUIRE(pi.word[0] == 0xd16cfe09u);
  REQUIRE(pi.word[1] == 0x94fdccebu);
  REQUIRE(pi.word[2] == 0x5001e420u);
  REQUIRE(pi.word[3] == 0x24126ea1u);
}

TEST_CASE("a sample's draws depend only on seed, epoch and index", "[rng]") {
  auto draws = [](uint64_t seed, uint64_t epoch, uint64_t index) {
    ddp::SampleRng rng(seed, epoch, index);
    return std::vector<uint32_t>{rng.next(), rng.next(), rng.next(), rng.next(), rng.next()};
  };
  REQUIRE(draws(1, 2, 3) == draws(1, 2, 3));
  REQUIRE(draws(1, 2, 3) != draws(2, 2, 3));
  REQUIRE(draws(1, 2, 3) != draws(1, 3, 3));
  REQUIRE(draws(1, 2, 3) != draws(1, 2, 4));
  REQUIRE(draws(1, 2, 3) != draws(1, 2, 3 + (uint64_t{1} << 32)));
}

TEST_CASE("draws are uniform", "[rng]") {
  std::vector<int> histogram(10, 0);
  double sum = 0;
  int heads = 0;
  const int num_draws = 100000;
  for (int i = 0; i < num_draws; ++i) {
    ddp::SampleRng rng(7, 1, static_cast<uint64_t>(i));
    ++histogram[rng.below(10)];
    heads += rng.coin();
    const float u = rng.uniform();
    REQUIRE((u >= 0 && u < 1));
    sum += u;
  }
  // Five standard deviations: sqrt(n p (1 - p)) and sqrt(1 / 12 n).
  for (int count : histogram) {
    REQUIRE(std::abs(count - num_draws / 10) < 5 * 95);
  }
  REQUIRE(std::abs(heads - num_draws / 2) < 5 * 158);
  REQUIRE(std::abs(sum / num_draws - 0.5) < 5 * 0.00092);
}

TEST_CASE("normal() is Box and Muller's transform of two draws", "[rng]") {
  // By NumPy from the draws of Philox4x32-10 with key 5 and counter (0, 3, 11, 0).
  ddp::SampleRng rng(5, 3, 11);
  for (const float expected : {-0.032053664f, 0.14824599f, -0.4810852f, -2.4975631f}) {
    REQUIRE(std::abs(rng.normal() - expected) <= 1e-7f * std::abs(expected));
  }
}

TEST_CASE("normal() has the moments and tails of the normal distribution", "[rng]") {
  const int num_draws = 400'000;
  double sum = 0, squares = 0, fourths = 0;
  std::vector<int> beyond(4, 0);  // of 0, 1, 2, 3
  for (int i = 0; i < num_draws / 4; ++i) {
    ddp::SampleRng rng(7, 1, static_cast<uint64_t>(i));
    for (int draw = 0; draw < 4; ++draw) {
      const double x = rng.normal();
      sum += x;
      squares += x * x;
      fourths += x * x * x * x;
      for (int bound = 0; bound < 4; ++bound) {
        beyond[bound] += x > bound;
      }
    }
  }
  // Five standard deviations of each mean: the variances are 1, 2, 96 and p (1 - p).
  const auto limit = [&](double variance) { return 5 * std::sqrt(variance / num_draws); };
  REQUIRE(std::abs(sum / num_draws) < limit(1));
  REQUIRE(std::abs(squares / num_draws - 1) < limit(2));
  REQUIRE(std::abs(fourths / num_draws - 3) < limit(96));
  for (int bound = 0; bound < 4; ++bound) {
    const double p = std::erfc(bound / std::sqrt(2.0)) / 2;
    INFO(bound);
    REQUIRE(std::abs(double(beyond[bound]) / num_draws - p) < limit(p * (1 - p)));
  }
}
