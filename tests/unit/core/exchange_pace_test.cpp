// SPDX-License-Identifier: Apache-2.0
#include "core/control/exchange_pace.hpp"

#include "support/catch.hpp"

namespace ddp {

TEST_CASE("where asking takes long, ranks ask less often") {
  using Pace = detail::ExchangePace;
  const Pace::Seconds interval(1.0);
  Pace pace;
  CHECK(pace.pause(interval).count() == 1.0);
  pace.note(Pace::Seconds(0.004));  // the first one counts only together with a second one
  CHECK(pace.pause(interval).count() == 1.0);
  pace.note(Pace::Seconds(0.005));
  CHECK(pace.pause(interval).count() == 1.0 - 0.004);
  pace.note(Pace::Seconds(0.060));
  CHECK(pace.pause(interval).count() == 1.0 - 0.005);  // waiting for a slow rank is not a cost
  pace.note(Pace::Seconds(0.060));
  CHECK(pace.pause(interval).count() == 49 * 0.060);
  pace.note(Pace::Seconds(1.6));
  pace.note(Pace::Seconds(1.6));
  CHECK(pace.pause(interval).count() == 5.0);
}

}  // namespace ddp
