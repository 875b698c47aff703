// SPDX-License-Identifier: Apache-2.0
// The ring through which the host reads a step's scalars. A thread plays the device.
#include <array>
#include <atomic>
#include <thread>

#include "ddp/core/error.hpp"
#include "support/catch.hpp"
#include "train/graph/step_ring.hpp"

namespace {

using namespace ddp;
using namespace ddp::detail;

std::shared_ptr<StepRing> make_ring(std::function<void()> check) {
  auto* slots = new PublishedSlot[StepRing::kNumSlots]();
  return std::make_shared<StepRing>(
      StepRing::Slots(slots, [](PublishedSlot* made) { delete[] made; }), std::move(check));
}

void publish_value(StepRing& ring, uint64_t sequence, double value) {
  auto& slot = ring.slots()[sequence % StepRing::kNumSlots];
  slot.values[1] = value;
  std::atomic_ref<uint64_t>(slot.sequence).store(sequence, std::memory_order_release);
}

}  // namespace

TEST_CASE("a log is readable once its step was published, and outlives its GraphedStep") {
  auto ring = make_ring([] {});
  ring->begin(1);
  const auto log = ring->log(1, 2);
  CHECK_FALSE(log.is_ready());
  std::thread device([ring] { publish_value(*ring, 1, 2.5); });
  CHECK(log[1] == 2.5);  // waits
  device.join();
  CHECK(log.is_ready());
  ring.reset();
  CHECK(log[1] == 2.5);
  CHECK_THROWS_WITH(log[2], Catch::Contains("there is no number 2"));
}

TEST_CASE("a step waits if the device is too many steps behind") {
  const auto ring = make_ring([] {});
  constexpr uint64_t kAhead = StepLog::kMaxStepsAhead;
  for (uint64_t sequence = 1; sequence <= kAhead; ++sequence) {
    ring->begin(sequence);  // none of them waits
  }
  std::atomic<bool> is_published = false;
  std::thread device([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    is_published = true;
    publish_value(*ring, 1, 0);
  });
  ring->begin(kAhead + 1);
  CHECK(is_published);
  device.join();
}

TEST_CASE("numbers whose slot may be overwritten are refused") {
  const auto ring = make_ring([] {});
  const auto begin_and_publish = [&](uint64_t sequence) {
    ring->begin(sequence);
    publish_value(*ring, sequence, static_cast<double>(sequence));
  };
  for (uint64_t sequence = 1; sequence < StepRing::kNumSlots; ++sequence) {
    begin_and_publish(sequence);
  }
  const auto log = ring->log(1, 2);
  ring->begin(StepRing::kNumSlots);
  CHECK(log[1] == 1);
  // Step 1's slot is not overwritten yet, but may be at any time.
  ring->begin(StepRing::kNumSlots + 1);
  CHECK_THROWS_AS(log[1].value(), SettingsError);
  CHECK(ring->log(2, 2)[1] == 2);
}

TEST_CASE("waiting for a step ends when the check throws") {
  const auto ring = make_ring([] { throw PeerLostError("rank 1 is lost"); });
  ring->begin(1);
  CHECK_THROWS_WITH(ring->log(1, 2)[1].value(), Catch::Contains("rank 1 is lost"));
}
