// SPDX-License-Identifier: Apache-2.0
#include "ddp/core/safetensors.hpp"

#include <ATen/ATen.h>

#include <filesystem>
#include <memory>
#include <system_error>

#include "core/files/file_mapping.hpp"
#include "core/files/file_ops.hpp"
#include "core/files/safetensors_header.hpp"
#include "core/files/serialize_tensors.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/check.hpp"
#include "ddp/detail/file_content.hpp"
#include "ddp/detail/list_safetensors.hpp"

namespace ddp {
namespace {

constexpr std::pair<const char*, at::ScalarType> kDtypes[] = {
    {"BOOL", at::kBool},        {"U8", at::kByte},
    {"I8", at::kChar},          {"I16", at::kShort},
    {"U16", at::kUInt16},       {"F16", at::kHalf},
    {"BF16", at::kBFloat16},    {"I32", at::kInt},
    {"U32", at::kUInt32},       {"F32", at::kFloat},
    {"I64", at::kLong},         {"U64", at::kUInt64},
    {"F64", at::kDouble},       {"F8_E4M3", at::kFloat8_e4m3fn},
    {"C64", at::kComplexFloat}, {"F8_E5M2", at::kFloat8_e5m2},
};

at::ScalarType to_scalar_type(const std::string& dtype) {
  for (const auto& [name, type] : kDtypes) {
    if (dtype == name) {
      return type;
    }
  }
  throw InternalError("unchecked safetensors dtype " + dtype);
}

// The JSON of a safetensors file begins after its length. Another file is named for what it is.
void check_content(std::string_view start, const std::string& path) {
  if (start.size() > 8 && start[8] == '{') {
    return;
  }
  if (const std::string content = describe_content(start); !content.empty()) {
    throw ReadError(path + " is not a valid safetensors file: it is " + content);
  }
}

detail::SafetensorsHeader read_header(const detail::FileMapping& mapping, const std::string& path) {
  check_content({reinterpret_cast<const char*>(mapping.data()), mapping.size()}, path);
  const uint64_t length = detail::parse_safetensors_length(mapping.data(), mapping.size(), path);
  const std::string_view json(reinterpret_cast<const char*>(mapping.data()) + 8, length);
  return detail::parse_safetensors_header(json, mapping.size(), path);
}

std::string start_of(const std::string& path, std::size_t num_bytes) {
  std::string why;
  auto start = detail::read_start(path, num_bytes, why);
  if (!start) {
    throw ReadError("cannot read " + path + ": " + why);
  }
  return *start;
}

// Reads only the header: a system without overcommit refuses to map a file larger than the memory.
detail::SafetensorsHeader read_header(const std::string& path) {
  std::string first = start_of(path, kContentBytes);
  check_content(first, path);
  first.resize(8);
  std::error_code error;
  const uint64_t file_size = std::filesystem::file_size(path, error);
  if (error) {
    throw ReadError("cannot read " + path + ": " + error.message());
  }
  const uint64_t length = detail::parse_safetensors_length(
      reinterpret_cast<const unsigned char*>(first.data()), file_size, path);
  const std::string start = start_of(path, 8 + length);
  if (start.size() < 8 + length) {
    throw ReadError(concat(path, " ended at byte ", start.size(), " while it was read"));
  }
  return detail::parse_safetensors_header(std::string_view(start).substr(8), file_size, path);
}

}  // namespace

std::vector<StoredTensorInfo> list_safetensors(const std::string& path) {
  auto header = read_header(path);
  std::vector<StoredTensorInfo> tensors;
  tensors.reserve(header.entries.size());
  for (auto& entry : header.entries) {
    tensors.push_back({.name = std::move(entry.name),
                       .dtype = std::move(entry.dtype),
                       .shape = std::move(entry.shape),
                       .offset = header.data_offset + entry.begin,
                       .num_bytes = entry.end - entry.begin});
  }
  return tensors;
}

Safetensors load_safetensors(const std::string& path) {
  std::string why;
  const auto mapping = detail::FileMapping::open(path, why);
  if (!mapping) {
    throw ReadError("cannot read " + path + ": " + why);
  }
  auto header = read_header(*mapping, path);
  Safetensors result;
  result.metadata = std::move(header.metadata);
  for (const auto& entry : header.entries) {
    const std::size_t offset = header.data_offset + entry.begin;
    if (entry.dtype == "BOOL" &&
        !detail::are_bools(mapping->data() + offset, entry.end - entry.begin)) {
      throw ReadError(path + " is not a valid safetensors file: the bool tensor '" + entry.name +
                      "' has a byte other than 0 and 1");
    }
    result.tensors.emplace(
        entry.name, detail::tensor_over(mapping, offset, entry.shape, to_scalar_type(entry.dtype)));
  }
  return result;
}

void save_safetensors(const std::string& path, const TensorMap& tensors,
                      const std::map<std::string, std::string>& metadata) {
  TensorMap on_cpu;
  for (const auto& [name, tensor] : tensors) {
    on_cpu.emplace(name, tensor.detach().to(at::kCPU).contiguous());
  }
  const auto serialized = [&] {
    try {
      return detail::serialize_tensors(on_cpu, metadata);
    } catch (const WriteError& error) {
      throw WriteError("cannot write " + path + ": " + error.what());
    }
  }();
  std::vector<std::string_view> chunks{serialized.header};
  for (const auto& tensor : serialized.data) {
    chunks.emplace_back(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  }
  replace_file(system_file_ops(), path, chunks);
}

namespace detail {

std::string safetensors_dtype(at::ScalarType dtype, const std::string& name) {
  for (const auto& [word, type] : kDtypes) {
    if (type == dtype) {
      return word;
    }
  }
  throw WriteError("the safetensors format has no dtype for the tensor '" + name + "' of type " +
                   at::toString(dtype));
}

SerializedTensors serialize_tensors(const TensorMap& tensors,
                                    const std::map<std::string, std::string>& metadata) {
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, tensor] : tensors) {
    DDP_CHECK(tensor.device().is_cpu() && tensor.is_contiguous(), name);
    entries.push_back({.name = name,
                       .dtype = safetensors_dtype(tensor.scalar_type(), name),
                       .shape = tensor.sizes().vec()});
  }
  SerializedTensors result;
  result.header = make_safetensors_header(entries, metadata);
  for (const auto& entry : entries) {
    result.data.push_back(tensors.at(entry.name));
  }
  return result;
}

}  // namespace detail
}  // namespace ddp
