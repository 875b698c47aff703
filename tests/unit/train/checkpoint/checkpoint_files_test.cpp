// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <random>

#include "support/catch.hpp"
#include "support/file_rights.hpp"
#include "support/message_of.hpp"
#include "support/named_pipe.hpp"
#include "train/checkpoint/checkpoint_files.hpp"
#include "unit/train/checkpoint/crash_model.hpp"

namespace {

using namespace ddp::detail;
using ddp::FileOps;
using ddp::remove_folder;
using ddp::system_file_ops;
using ddp::write_new_file;
using ddp::xxh3;
using testing::CrashModel;
using testing::RecordingOps;
using testing::TemporaryFolder;

std::string content(const std::string& what, int64_t step) {
  std::string text = what + " of step " + std::to_string(step) + ":";
  for (int i = 0; i < 50; ++i) {
    text += static_cast<char>('a' + (step * 7 + i * 3) % 26);
  }
  return text;
}

// Saves two files like the Checkpointer, and prunes old checkpoints.
CheckpointFolder save(FileOps& ops, const std::string& dir, int64_t step, int64_t keep_last = 1) {
  const auto saving = begin_save(ops, dir, step);
  Manifest manifest{.step = step, .world_size = 2};
  try {
    for (const std::string name : {"model.safetensors", "rank_00000.safetensors"}) {
      const auto text = content(name, step);
      const std::string_view view(text);
      manifest.files.push_back(
          write_new_file(ops, dir + "/" + saving, name, {view.substr(0, 20), view.substr(20)}));
    }
  } catch (...) {
    remove_folder(ops, dir + "/" + saving);
    throw;
  }
  const auto folder = commit_save(ops, dir, saving, manifest);
  prune_checkpoints(ops, dir, folder, {.keep_last = keep_last});
  return folder;
}

// Returns the step of the newest valid checkpoint, comparing its contents byte by byte; -1: none.
int64_t load_newest(const std::string& dir) {
  for (const auto& folder : list_checkpoints(dir)) {
    try {
      const auto manifest = check_checkpoint(dir, folder);
      REQUIRE(manifest.files.size() == 2);
      for (const auto& file : manifest.files) {
        REQUIRE(testing::read_file(dir + "/" + folder.name + "/" + file.name) ==
                content(file.name, manifest.step));
      }
      return manifest.step;
    } catch (const ddp::ReadError&) {
      continue;
    }
  }
  return -1;
}

// Fails the n-th call in a given way; with `persistent`, every later one too.
class FailingOps : public FileOps {
 public:
  FailingOps(int number, int error, bool persistent)
      : number_(number), error_(error), persistent_(persistent) {}
  int calls = 0;

  int open(const char* p, int f, mode_t m) override {
    return fails() ? -1 : FileOps::open(p, f, m);
  }
  ssize_t write(int fd, const void* data, std::size_t size) override {
    if (error_ == 0 && hit()) {
      return FileOps::write(fd, data, (size + 1) / 2);  // a short write
    }
    return error_ != 0 && fails() ? -1 : FileOps::write(fd, data, size);
  }
  int fsync(int fd) override { return fails() ? -1 : FileOps::fsync(fd); }
  int close(int fd) override {
    const int result = FileOps::close(fd);
    return fails() ? -1 : result;
  }
  int rename(const char* a, const char* b) override { return fails() ? -1 : FileOps::rename(a, b); }
  int mkdir(const char* p, mode_t m) override { return fails() ? -1 : FileOps::mkdir(p, m); }

 private:
  bool hit() {
    const int n = calls++;
    return n == number_ || (persistent_ && n > number_ && number_ >= 0);
  }
  bool fails() {
    if (error_ == 0) {
      return hit() && false;
    }
    if (!hit()) {
      return false;
    }
    errno = error_;
    return true;
  }
  int number_, error_;
  bool persistent_;
};

}  // namespace

TEST_CASE("a manifest keeps every value and notices every changed byte") {
  Manifest manifest{.step = 120, .world_size = 4, .metric = 0.1 + 0.2, .finite = false};
  manifest.files = {{"model.safetensors", 1u << 31, 0x0123456789abcdef},
                    {"b", 0, UINT64_MAX, true}};
  manifest.format = 3;
  manifest.values["scaler"] = {{"scale", 65536.0}, {"on", true},      {"n", int64_t{1} << 60},
                               {"text", "ü \"\n"}, {"inf", INFINITY}, {"tiny", 5e-324},
                               {"minus", -0.0},    {"whole", 3.0},    {"third", 1.0 / 3}};
  manifest.samples_per_step = 512;
  manifest.keep_best = "max";
  manifest.texts["settings"] = "a: 1\nb: 2\n";
  const auto text = manifest_to_json(manifest);
  const auto parsed = parse_manifest(text, "m");
  REQUIRE(parsed == manifest);
  REQUIRE(std::signbit(std::get<double>(parsed.values.at("scaler").at("minus"))));
  REQUIRE(std::holds_alternative<double>(parsed.values.at("scaler").at("whole")));
  for (std::size_t i = 0; i < text.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      auto bad = text;
      bad[i] = static_cast<char>(bad[i] ^ 1 << bit);
      REQUIRE_THROWS_AS(parse_manifest(bad, "m"), ddp::ReadError);
    }
    REQUIRE_THROWS_AS(parse_manifest(text.substr(0, i), "m"), ddp::ReadError);
  }
}

TEST_CASE("a manifest that nobody could read is not written, and its longest text is named") {
  Manifest manifest;
  manifest.texts = {{"settings", "a: 1"}, {"tokenizer", std::string(17u << 20, 'x')}};
  REQUIRE_THROWS_WITH(manifest_to_json(manifest),
                      Catch::Contains("'tokenizer'") && Catch::Contains("at most 16777216"));
}

TEST_CASE("of a linked folder only the link is removed") {
  TemporaryFolder folder;
  std::filesystem::create_directory(folder.file("theirs"));
  testing::write_file(folder.file("theirs/model.safetensors"), "weights");
  std::filesystem::create_directory_symlink("theirs", folder.file("link"));
  ddp::remove_folder(ddp::system_file_ops(), folder.file("link"));
  REQUIRE_FALSE(std::filesystem::is_symlink(folder.file("link")));
  REQUIRE(testing::read_file(folder.file("theirs/model.safetensors")) == "weights");
}

namespace {

// `text`, a manifest, with `from` replaced by `to` and a checksum that matches.
std::string edited(const std::string& text, const std::string& from, const std::string& to) {
  auto body = text.substr(0, text.find(",\n\"manifest_xxh3\""));
  const auto at = body.find(from);
  REQUIRE(at != std::string::npos);
  body.replace(at, from.size(), to);
  char checksum[17];
  std::snprintf(checksum, sizeof checksum, "%016llx", static_cast<unsigned long long>(xxh3(body)));
  return ddp::concat(body, ",\n\"manifest_xxh3\": \"", checksum, "\"\n}\n");
}

}  // namespace

TEST_CASE("masters that earlier versions saved in place of their parameters are known by pair") {
  const auto text = manifest_to_json({.step = 120});
  const std::string none = "\"leaf_dtypes\": {}";
  const auto first = parse_manifest(edited(text, none, R"("leaf_dtypes": {"w": "BF16"})"), "m");
  REQUIRE(first.leaf_dtypes.at(ddp::detail::kDefaultPair).at("w") == "BF16");
  const auto second = parse_manifest(
      edited(
          text, none,
          R"("leaf_dtypes": {}, "leaf_dtypes_by_pair": {"generator/its_optimizer": {"w": "F16"}})"),
      "m");
  REQUIRE(second.leaf_dtypes.at("generator/its_optimizer").at("w") == "F16");
}

TEST_CASE("files of parts need format 3, so an older program refuses the checkpoint") {
  Manifest manifest{.files = {{"model.safetensors", 400, 7}}};
  REQUIRE(parse_manifest(manifest_to_json(manifest), "m").format == 1);
  manifest.files.push_back({"optimizer.rank_00001.safetensors", 400, 7, true});
  REQUIRE(parse_manifest(manifest_to_json(manifest), "m").format == 3);
}

TEST_CASE("a manifest without the field finite describes a finite checkpoint") {
  const auto text = manifest_to_json({.step = 120, .finite = false});
  REQUIRE(parse_manifest(edited(text, " \"finite\": false,\n", ""), "m").finite);
}

TEST_CASE("a manifest of a newer format, with a path in a name, or too deep is refused") {
  Manifest newer{.format = kCheckpointFormat + 1};
  REQUIRE_THROWS_AS(parse_manifest(manifest_to_json(newer), "m"), NewerFormatError);
  for (const std::string name : {"../x", "/etc/passwd", "..", "", "a/b"}) {
    Manifest outside{.files = {{name, 1, 1}}};
    REQUIRE_THROWS_AS(parse_manifest(manifest_to_json(outside), "m"), ddp::ReadError);
  }
  const std::string deep = "{\"a\": " + std::string(100'000, '[');
  const auto text = ddp::concat(deep, ",\n\"manifest_xxh3\": \"");
  REQUIRE_THROWS_AS(parse_manifest(text, "m"), ddp::ReadError);
}

TEST_CASE("a manifest with fractional or out-of-range numbers is refused") {
  const Manifest manifest{.step = 3,
                          .world_size = 2,
                          .files = {{"model.safetensors", 400, 7}},
                          .values = {{"scaler", {{"growth", int64_t{5}}}}}};
  const auto good = manifest_to_json(manifest);
  // The checksum matches: a writer of a manifest writes its checksum too.
  const auto changed = [&](const std::string& from, const std::string& to) {
    auto text = good;
    const auto place = text.find(from);
    REQUIRE(place != std::string::npos);
    text.replace(place, from.size(), to);
    const auto digits = text.rfind("\"manifest_xxh3\": \"") + 18;
    const auto body = text.substr(0, text.rfind(",\n\"manifest_xxh3"));
    char sum[17];
    std::snprintf(sum, sizeof sum, "%016llx", static_cast<unsigned long long>(xxh3(body)));
    return text.replace(digits, 16, sum);
  };
  REQUIRE(parse_manifest(changed("\"size\": 400", "\"size\": 401"), "m").files[0].size == 401);
  const auto refused = [&](const std::string& from, const std::string& to) {
    INFO(to);
    try {
      parse_manifest(changed(from, to), "ckpt/manifest.json");
      FAIL("accepted");
    } catch (const ddp::ReadError& error) {
      CHECK_THAT(error.what(), Catch::StartsWith("ckpt/manifest.json is not a valid manifest"));
    }
  };
  for (const std::string bad :
       {"1e300", "-1", "4.5", "4e2", "true", "\"4\"", "null", "18446744073709551615", "1e-3"}) {
    refused("\"size\": 400", "\"size\": " + bad);
    refused("\"step\": 3", "\"step\": " + bad);
    refused("\"world_size\": 2", "\"world_size\": " + bad);
    refused("\"format\": 1", "\"format\": " + bad);
  }
  refused("\"format\": 1", "\"format\": 1.9");
  refused("\"format\": 1", "\"format\": 0");
  refused("\"world_size\": 2", "\"world_size\": 0");
  refused("\"growth\": 5", "\"growth\": []");
}

TEST_CASE("a power loss after the first save loses no parent folder") {
  TemporaryFolder folder;
  RecordingOps recording;
  CrashModel model(folder.path());
  save(recording, folder.file("runs/a/ckpt"), 10);
  for (const auto& call : recording.calls) {
    model.apply(call);
  }
  TemporaryFolder state;
  model.write_state(state.path(), {}, 0);  // only synced data survives
  REQUIRE(load_newest(state.file("runs/a/ckpt")) == 10);
}

TEST_CASE("a save that crashes at any call leaves the old or the new checkpoint") {
  TemporaryFolder folder;
  const auto dir = folder.file("ckpt");
  save(system_file_ops(), dir, 10);
  RecordingOps recording;
  CrashModel model(dir);
  save(recording, dir, 20);
  REQUIRE(load_newest(dir) == 20);
  REQUIRE(list_checkpoints(dir).size() == 1);

  int states = 0, old_seen = 0, new_seen = 0;
  bool committed = false;
  const auto check = [&](const std::set<std::size_t>& kept, double data_kept) {
    TemporaryFolder state;
    model.write_state(state.file("ckpt"), kept, data_kept);
    const auto step = load_newest(state.file("ckpt"));
    INFO("state " << states << " after call with " << kept.size() << " kept");
    REQUIRE((step == 10 || step == 20));
    REQUIRE((!committed || step == 20));  // a committed save must survive
    ++states;
    ++(step == 10 ? old_seen : new_seen);
  };
  for (std::size_t cut = 0; cut <= recording.calls.size(); ++cut) {
    const auto open = model.open_changes();
    const std::set<std::size_t> all(open.begin(), open.end());
    for (const double data_kept : {1.0, 0.5, 0.0}) {
      check(all, data_kept);
      check({}, data_kept);
      for (const auto one : open) {
        check({one}, data_kept);
        auto others = all;
        others.erase(one);
        check(others, data_kept);
      }
    }
    if (cut < recording.calls.size()) {
      const auto& call = recording.calls[cut];
      model.apply(call);
      committed = committed || (call.kind == RecordingOps::Kind::SyncFolder && call.path == dir);
    }
  }
  INFO(states << " states: " << old_seen << " old, " << new_seen << " new");
  REQUIRE(states > 100);
  REQUIRE(old_seen > 20);
  REQUIRE(new_seen > 20);
}

TEST_CASE("a save that fails at any call leaves only the old checkpoint") {
  FailingOps counting(-1, EIO, false);
  {
    TemporaryFolder folder;
    save(counting, folder.file("ckpt"), 10);
  }
  const bool persistent = GENERATE(false, true);
  const int error = GENERATE(ENOSPC, EIO, EROFS, EDQUOT, EINTR, 0 /* short write */);
  if (persistent && (error == EINTR || error == 0)) {
    return;  // would block forever, as intended
  }
  for (int n = 0; n < counting.calls; ++n) {
    INFO("call " << n << " of " << counting.calls << ", errno " << error);
    TemporaryFolder folder;
    const auto dir = folder.file("ckpt");
    save(system_file_ops(), dir, 10, 2);
    FailingOps failing(n, error, persistent);
    try {
      save(failing, dir, 20, 2);
      REQUIRE(load_newest(dir) == 20);
    } catch (const ddp::WriteError& failure) {
      REQUIRE_THAT(failure.what(), Catch::Contains(dir));
      // Only a failed fsync of the parent, after the rename, may leave the new one in place.
      REQUIRE(load_newest(dir) >= 10);
      REQUIRE(error != 0);
    }
    REQUIRE(list_checkpoints(dir).back().step == 10);
    for (const auto& entry : std::filesystem::directory_iterator(dir)) {
      const auto name = entry.path().filename().string();
      const bool litter = name.find("step_") != 0;
      REQUIRE(!litter);
    }
  }
}

TEST_CASE("damage anywhere in a checkpoint is detected and named") {
  TemporaryFolder folder;
  const auto dir = folder.file("ckpt");
  const auto checkpoint = save(system_file_ops(), dir, 10);
  REQUIRE_NOTHROW(check_checkpoint(dir, checkpoint));
  const auto damage = [&] {
    try {
      check_checkpoint(dir, checkpoint);
    } catch (const ddp::ReadError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  std::mt19937 random(1);
  for (const std::string name : {"model.safetensors", "rank_00000.safetensors", "manifest.json"}) {
    const auto path = dir + "/" + checkpoint.name + "/" + name;
    const auto good = testing::read_file(path);
    for (int i = 0; i < 1000; ++i) {
      auto bad = good;
      bad[random() % bad.size()] ^= static_cast<char>(1 << random() % 8);
      testing::write_file(path, bad);
      REQUIRE_THAT(damage(), Catch::Contains(path));
    }
    for (std::size_t size = 0; size < good.size(); size += 7) {
      testing::write_file(path, good.substr(0, size));
      REQUIRE_THAT(damage(), Catch::Contains(path));
    }
    testing::write_file(path, good + "x");
    REQUIRE_THAT(damage(), Catch::Contains(path));
    std::filesystem::remove(path);
    REQUIRE_THAT(damage(), Catch::Contains(path));
    testing::write_file(path, good);
    REQUIRE(damage() == "");
  }
}

TEST_CASE("a named pipe in place of a checkpoint's file counts as damage") {
  const TemporaryFolder folder;
  FileOps ops;
  const auto checkpoint = save(ops, folder.path(), 3);
  for (const auto* name : {"model.safetensors", "manifest.json"}) {
    const testing::NamedPipe pipe(folder.path() + "/" + checkpoint.name + "/" + name);
    CHECK_THAT(
        testing::message_of<ddp::ReadError>([&] { check_checkpoint(folder.path(), checkpoint); }),
        Catch::Contains(name) && Catch::Contains("it is not a regular file"));
    CHECK_FALSE(pipe.was_waited_for());
  }
}

TEST_CASE("the newest checkpoints and the best one are kept") {
  TemporaryFolder folder;
  const auto dir = folder.file("ckpt");
  auto& ops = system_file_ops();
  const double metrics[] = {0.5, 0.9, 0.7, NAN, 0.8};
  for (int i = 0; i < 5; ++i) {
    const auto saving = begin_save(ops, dir, 10 * (i + 1));
    const auto made = commit_save(ops, dir, saving, {.step = 10 * (i + 1), .metric = metrics[i]});
    prune_checkpoints(ops, dir, made, {.keep_last = 2, .keep_best = true, .best_is_max = true});
  }
  std::vector<int64_t> steps;
  for (const auto& found : list_checkpoints(dir)) {
    steps.push_back(found.step);
  }
  REQUIRE(steps == std::vector<int64_t>{50, 40, 20});
  // Saves the same step again: next to the first one, never over it, and newer.
  const auto again = commit_save(ops, dir, begin_save(ops, dir, 50), {.step = 50});
  REQUIRE(again.name == "step_0000000050.1");
  REQUIRE(list_checkpoints(dir).front() == again);
  // The next start removes leftovers of a crashed save; other files stay.
  begin_save(ops, dir, 60);
  testing::write_file(dir + "/step_notes.txt", "mine");
  testing::write_file(dir + "/.try_0123456789abcdef", "x");
  testing::write_file(dir + "/.owner.0123456789abcdef", "");
  remove_stale_saves(ops, dir);
  REQUIRE(list_checkpoints(dir).size() == 4);
  REQUIRE(std::distance(std::filesystem::directory_iterator(dir), {}) == 5);
  REQUIRE(list_checkpoints(folder.file("none")).empty());
}

TEST_CASE("only their owner can read the files of a save") {
  TemporaryFolder folder;
  const auto dir = folder.file("a/b/ckpt");
  const testing::Umask umask(022);
  const auto made = save(system_file_ops(), dir, 10);
  for (const auto& entry : std::filesystem::directory_iterator(dir + "/" + made.name)) {
    REQUIRE(testing::rights_of(entry.path()) == 0600);
  }
}

TEST_CASE("damaged checkpoints do not count and never evict a complete one") {
  TemporaryFolder folder;
  const auto dir = folder.file("ckpt");
  auto& ops = system_file_ops();
  save(ops, dir, 10, 9);
  save(ops, dir, 20, 9);
  const auto damaged = save(ops, dir, 30, 9);
  std::set<std::string> known;
  const auto path = dir + "/" + damaged.name + "/";
  const auto good = testing::read_file(path + "model.safetensors");
  switch (GENERATE(0, 1, 2)) {
    case 0:  // truncated
      testing::write_file(path + "model.safetensors", good.substr(1));
      break;
    case 1:
      std::filesystem::remove(path + "manifest.json");
      break;
    default:  // a flipped bit, found only by reading all data
      known.insert(damaged.name);
  }
  const auto make = [&](int64_t step) {
    const auto made = commit_save(ops, dir, begin_save(ops, dir, step), {.step = step});
    prune_checkpoints(ops, dir, made, {.keep_last = 2, .damaged = known});
    std::vector<int64_t> steps;
    for (const auto& found : list_checkpoints(dir)) {
      steps.push_back(found.step);
    }
    return steps;
  };
  REQUIRE(make(40) == std::vector<int64_t>{40, 30, 20});
  REQUIRE(make(50) == std::vector<int64_t>{50, 40});
}
