// SPDX-License-Identifier: Apache-2.0
#include "support/multi_rank_main.hpp"

#define CATCH_CONFIG_RUNNER
#include "core/control/failure/failure_cause.hpp"
#include "support/catch.hpp"
#include "support/grouping_locale.hpp"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>

#include "ddp/core/error.hpp"

namespace ddp::test {
namespace {

std::optional<Context>& shared_context() {
  static std::optional<Context> context;
  return context;
}

#if __has_include(<catch2/catch_all.hpp>)
using ListenerBase = Catch::EventListenerBase;
#else
using ListenerBase = Catch::TestEventListenerBase;
#endif

// Keeps the ranks in step. A failure on one rank does not leave the others in a collective.
class RankListener : public ListenerBase {
 public:
  using ListenerBase::ListenerBase;

  void testCaseStarting(const Catch::TestCaseInfo& info) override {
    ListenerBase::testCaseStarting(info);
    name_ = info.name;
    if (shared_context()) {
      context().set_progress(-1, "test case \"" + name_ + "\"");
    }
  }

  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    ListenerBase::testCaseEnded(stats);
    if (!shared_context()) {
      return;
    }
    if (stats.totals.assertions.failed > 0) {
      FailureCause cause;
      cause.rank = context().rank();
      cause.where = "test case \"" + name_ + "\"";
      cause.message = "the test failed on this rank";
      cause.exit_code = ExitCode::UserException;
      context().control_plane().publish_failure(cause);
      return;
    }
    try {
      context().control_plane().require_equal("test case", name_);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "after test case \"%s\": %s\n", name_.c_str(), error.what());
      std::fflush(nullptr);
      std::_Exit(static_cast<int>(ExitCode::PeerLost));  // a passing rank must not report success
    }
  }

 private:
  std::string name_;
};

CATCH_REGISTER_LISTENER(RankListener)

std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

ContextOptions context_options() {
  ContextOptions options;
  options.device =
      variable("DDP_TEST_DEVICE", "cpu") == "cuda" ? DeviceChoice::Cuda : DeviceChoice::Cpu;
  options.communicator.check_collectives = checks_collectives();
  return options;
}

int run_session(int argc, char** argv) {
  Catch::Session session;
  if (const int code = session.applyCommandLine(argc, argv); code != 0) {
    return code;
  }
  session.configData().abortAfter = 1;
  shared_context().emplace(Context::create(context_options()));
  const int failures = session.run();
  if (failures != 0) {
    // Skips the ordered teardown: the peers' collectives were aborted, and no agreement is
    // possible.
    std::fflush(nullptr);
    std::_Exit(1);
  }
  shared_context()->close();
  shared_context().reset();
  return 0;
}

}  // namespace

Context& context() {
  return shared_context().value();
}

bool checks_collectives() {
  const bool cuda = variable("DDP_TEST_DEVICE", "cpu") == "cuda";
  return variable("DDP_TEST_CHECK_COLLECTIVES", cuda ? "0" : "1") == "1";
}

}  // namespace ddp::test

int main(int argc, char** argv) {
  testing::set_test_locale();
  try {
    return ddp::test::run_session(argc, argv);
  } catch (const ddp::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.exit_code());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(ddp::ExitCode::UserException);
  }
}
