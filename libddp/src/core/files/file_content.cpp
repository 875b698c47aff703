// SPDX-License-Identifier: Apache-2.0
#include "ddp/detail/file_content.hpp"

#include <algorithm>

#include "core/log/lower_case.hpp"

namespace ddp {
namespace {

using namespace std::string_view_literals;

constexpr const char* kPickle =
    "a pickle of Python objects, as torch.save writes (save it again as safetensors)";

// A file's bytes at an offset, and what they say.
struct Signature {
  std::size_t offset;
  std::string_view bytes;
  const char* name;
};
// The first match counts.
constexpr Signature kSignatures[] = {
    {0, "version https://git-lfs."sv, "a Git LFS pointer (git lfs pull fetches the file)"},
    {0, "\x89PNG"sv, "a PNG image"},
    {0, "\xff\xd8\xff"sv, "a JPEG image"},
    {8, "WEBP"sv, "a WebP image"},
    {0, "GIF8"sv, "a GIF image"},
    {0, "II*\0"sv, "a TIFF image"},
    {0, "MM\0*"sv, "a TIFF image"},
    {4, "ftypavif"sv, "an AVIF image"},
    {4, "ftyphei"sv, "a HEIC image"},
    {0, "\0\5\x16\7"sv, "a macOS resource file (AppleDouble)"},
    {0, "\x1f\x8b"sv, "a gzip archive"},
    {0,
     "\xfd"
     "7zXZ\0"sv,
     "an xz archive"},
    {0, "BZh"sv, "a bzip2 archive"},
    {0, "\x28\xb5\x2f\xfd"sv, "a zstd archive"},
    {0, "7z\xbc\xaf\x27\x1c"sv, "a 7z archive"},
    {0, "Rar!"sv, "a rar archive"},
    {257, "ustar"sv, "a tar archive"},
    {0, "\x93NUMPY"sv, "an array of NumPy (.npy)"},
    {0, "\x89HDF\r\n"sv, "an HDF5 file"},
    {0, "GGUF"sv, "a GGUF model"},
    {0, "PAR1"sv, "a Parquet file"},
    {0, "%PDF"sv, "a PDF document"},
    // Protocols 2 to 5, whose first opcode is a frame, a container or a global.
    {0, "\x80\2"sv, kPickle},
    {0, "\x80\3"sv, kPickle},
    {0, "\x80\4"sv, kPickle},
    {0, "\x80\5"sv, kPickle},
    {8, "{\""sv, "a safetensors file"},
};

bool is_text(std::string_view start) {
  return std::all_of(start.begin(), start.end(), [](unsigned char c) {
    return c >= ' ' ? c != 0x7f : c == '\t' || c == '\n' || c == '\r' || c == '\f';
  });
}

bool starts_page(std::string_view text) {
  const std::string start = detail::lower_case(std::string(text.substr(0, 16)));
  return start.starts_with("<!doctype html") || start.starts_with("<html") ||
         start.starts_with("<head");
}

std::string describe_text(std::string_view start) {
  const auto first = start.find_first_not_of(" \t\r\n\f");
  if (first == std::string_view::npos) {
    return "text of blanks";
  }
  const std::string_view text = start.substr(first);
  if (starts_page(text)) {
    return "an HTML page, as of a failed download or a login";
  }
  if (text.starts_with("<?xml") || text.starts_with("<Error>")) {
    return "an XML document, as of a failed download";
  }
  return text.front() == '{' || text.front() == '[' ? "JSON text" : "text";
}

}  // namespace

std::string describe_content(std::string_view start) {
  start = start.substr(0, kContentBytes);
  if (start.empty()) {
    return "an empty file";
  }
  // torch.save's archive begins with a folder's data.pkl.
  if (start.starts_with("PK\3\4")) {
    return start.find("/data.pkl") != std::string_view::npos ? kPickle
                                                             : "a zip archive (such as .npz)";
  }
  if (start.size() > 9 && start.starts_with("BM") && start.substr(6).starts_with("\0\0\0\0"sv)) {
    return "a BMP image";
  }
  for (const Signature& signature : kSignatures) {
    if (start.size() > signature.offset &&
        start.substr(signature.offset).starts_with(signature.bytes)) {
      return signature.name;
    }
  }
  if (is_text(start)) {
    return describe_text(start);
  }
  const bool is_zero = std::all_of(start.begin(), start.end(), [](char c) { return c == '\0'; });
  return is_zero ? "a file of zero bytes, as an interrupted copy leaves it" : "";
}

std::string content_note(std::string_view start) {
  const std::string content = describe_content(start);
  return content.empty() ? "" : "; it is " + content;
}

}  // namespace ddp
