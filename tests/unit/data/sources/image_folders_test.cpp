// SPDX-License-Identifier: Apache-2.0
// Counts how often a data set of folders queries the file system: a million images on a shared one
// take minutes.
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <string>

#include "ddp/data/dataset.hpp"
#include "support/catch.hpp"
#include "unit/data/data_test_support.hpp"
#include "unit/data/images/jpeg_writer.hpp"

namespace {

std::atomic<int> num_looks{0};     // queries of an image by name
std::atomic<int> num_listings{0};  // listings of a class folder

void count_look(const char* path) {
  num_looks += std::strstr(path, ".jpg") != nullptr ? 1 : 0;
}

}  // namespace

// Counting versions of the C library's functions that std::filesystem calls. The library may use
// the copy of std::filesystem in LibTorch, which calls stat by its name in older C libraries.
extern "C" {
int __xstat(int, const char* path, struct stat* out) noexcept {
  count_look(path);
  return static_cast<int>(syscall(SYS_newfstatat, AT_FDCWD, path, out, 0));
}
int __lxstat(int, const char* path, struct stat* out) noexcept {
  count_look(path);
  return static_cast<int>(syscall(SYS_newfstatat, AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW));
}
int stat(const char* path, struct stat* out) noexcept {
  count_look(path);
  return static_cast<int>(syscall(SYS_newfstatat, AT_FDCWD, path, out, 0));
}
int lstat(const char* path, struct stat* out) noexcept {
  count_look(path);
  return static_cast<int>(syscall(SYS_newfstatat, AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW));
}
DIR* fdopendir(int descriptor) {
  std::array<char, 4096> path{};
  const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
  if (readlink(link.c_str(), path.data(), path.size() - 1) > 0) {
    num_listings += std::strstr(path.data(), "/class_") != nullptr ? 1 : 0;
  }
  static const auto next = reinterpret_cast<DIR* (*)(int)>(dlsym(RTLD_NEXT, "fdopendir"));
  return next(descriptor);
}
}

TEST_CASE("image folders are listed once and their files are not queried", "[image_folders]") {
  constexpr int kClasses = 4, kImages = 25;
  data_test::TempFolder folder;
  const std::string jpeg = data_test::make_jpeg(80, 70);
  for (const char* split : {"train", "val"}) {
    for (int c = 0; c < kClasses; ++c) {
      for (int i = 0; i < kImages; ++i) {
        data_test::write_file(
            folder.path() / split / ("class_" + std::to_string(c)) / (std::to_string(i) + ".jpg"),
            jpeg);
      }
    }
  }
  num_looks = num_listings = 0;
  const auto train = ddp::make_dataset({.path = folder.path()});
  REQUIRE(train->size() == kClasses * kImages);
  CHECK(num_looks == 0);
  CHECK(num_listings == kClasses);

  num_looks = num_listings = 0;
  const auto test = ddp::make_dataset({.path = folder.path()}, ddp::Split::Test);
  REQUIRE(test->size() == kClasses * kImages);
  CHECK(num_looks == 0);
  CHECK(num_listings <= kClasses + 1);  // and training's first image, which gives the size

  // Links to files are followed, with one query each.
  for (int i = 0; i < kImages; ++i) {
    const std::string name = std::to_string(i) + ".jpg";
    std::filesystem::create_symlink(folder.path() / "train" / "class_0" / name,
                                    folder.path() / "train" / "class_1" / ("link" + name));
  }
  num_looks = 0;
  REQUIRE(ddp::make_dataset({.path = folder.path()})->size() == (kClasses + 1) * kImages);
  CHECK(num_looks <= kImages);
}
