// SPDX-License-Identifier: Apache-2.0
#include "core/control/wire/message_codec.hpp"

#include <cmath>
#include <limits>
#include <map>

#include "support/catch.hpp"

namespace ddp::detail {
namespace {

enum class Colour { Red, Green };

struct Part {
  std::string name;
  uint64_t size = 0;
  bool operator==(const Part&) const = default;
  friend auto message_fields(Part& part) { return std::tie(part.name, part.size); }
};

struct Whole {
  bool flag = false;
  int number = 0;
  int64_t wide = 0;
  double real = 0;
  Colour colour = Colour::Red;
  std::optional<double> metric = {};
  std::vector<Part> parts = {};
  std::vector<std::pair<std::size_t, std::string>> words = {};
  bool operator==(const Whole&) const = default;
  friend auto message_fields(Whole& w) {
    return std::tie(w.flag, w.number, w.wide, w.real, w.colour, w.metric, w.parts, w.words);
  }
};

Whole filled() {
  return {.flag = true,
          .number = -7,
          .wide = std::numeric_limits<int64_t>::min(),
          .real = -0.1,
          .colour = Colour::Green,
          .metric = INFINITY,
          .parts = {{"a b\n\xff", std::numeric_limits<uint64_t>::max()}, {"", 0}},
          .words = {{3, "!74!"}}};
}

}  // namespace

TEST_CASE("a struct comes back from its message bit for bit") {
  CHECK(decode_message<Whole>(encode_message(filled())) == filled());
  CHECK(decode_message<Whole>(encode_message(Whole{})) == Whole{});
  CHECK(std::isnan(decode_message<double>(encode_message(double(NAN)))));
  const std::vector<int64_t> numbers{1, -2};
  CHECK(decode_message<std::vector<int64_t>>(encode_message(numbers)) == numbers);
}

TEST_CASE("a message that was cut, has more behind it, or lies about a length is refused") {
  const auto message = encode_message(filled());
  for (std::size_t size = 0; size < message.size(); ++size) {
    CHECK_THROWS_AS(decode_message<Whole>(std::string_view(message).substr(0, size)), ReadError);
  }
  CHECK_THROWS_AS(decode_message<Whole>(message + "x"), ReadError);
  const std::string many(4, '\xff');  // 4294967295 elements
  CHECK_THROWS_AS(decode_message<std::vector<int64_t>>(many), ReadError);
}

TEST_CASE("a message that no encoder writes is refused") {
  enum class Narrow : uint8_t { First };
  CHECK_THROWS_AS(decode_message<Narrow>(encode_message(uint64_t{256})), ReadError);
  CHECK_THROWS_AS(decode_message<bool>(encode_message(2)), ReadError);
  CHECK_THROWS_AS(decode_message<int>(encode_message(int64_t{1} << 32)), ReadError);

  using Entries = std::vector<std::pair<int, std::string>>;
  using Map = std::map<int, std::string>;
  CHECK(decode_message<Map>(encode_message(Entries{{-1, "a"}, {2, "b"}})).size() == 2);
  CHECK_THROWS_AS(decode_message<Map>(encode_message(Entries{{2, "b"}, {-1, "a"}})), ReadError);
  CHECK_THROWS_AS(decode_message<Map>(encode_message(Entries{{2, "a"}, {2, "b"}})), ReadError);
}

}  // namespace ddp::detail
