// SPDX-License-Identifier: Apache-2.0
#include "export/archive.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/control/wire/bounded_json.hpp"
#include "core/control/wire/unique_fd.hpp"
#include "core/files/file_mapping.hpp"
#include "core/files/file_ops.hpp"
#include "core/log/error_text.hpp"
#include "ddp/core/error.hpp"
#include "export/json_access.hpp"

namespace ddp::detail {
namespace {

constexpr std::size_t kMaxTableBytes = std::size_t{1} << 28;
constexpr std::size_t kMaxTableGrowth = 4096;  // of the zip's directory; more is reallocated
constexpr const char* kWeights = "data/weights/";

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw ReadError(
      concat("cannot read ", path, ": ", why, "; fix: write it with Python's torch.export.save()"));
}

// Entries are stored without compression, so together they are not longer than the file. This
// refuses a zip that unpacks to more than the memory.
std::map<std::string, std::size_t> entry_sizes(caffe2::serialize::PyTorchStreamReader& reader,
                                               std::size_t file_bytes) {
  std::map<std::string, std::size_t> sizes;
  std::size_t rest = file_bytes;
  for (const auto& name : reader.getAllRecords()) {
    const auto bytes = reader.getRecordSize(name);
    if (bytes > rest) {
      throw DataError(concat("its entry ", printable(name), " claims ", bytes,
                             " bytes; together the entries exceed the file"));
    }
    rest -= bytes;
    sizes.emplace(name, bytes);
  }
  return sizes;
}

std::size_t file_bytes(const std::string& path) {
  std::string why;
  const UniqueFd fd(open_to_read(path, why));
  const auto bytes = fd.valid() ? ::lseek(fd.get(), 0, SEEK_END) : -1;
  if (bytes < 0) {
    throw ReadError("cannot read " + path + ": " + why);
  }
  return static_cast<std::size_t>(bytes);
}

std::vector<int64_t> whole_numbers(const nlohmann::json& list, const char* what) {
  std::vector<int64_t> numbers;
  for (const auto& item : list) {
    numbers.push_back(whole_number(item.at("as_int"), 0, what));
  }
  return numbers;
}

// Elements that a tensor of these sizes and strides reaches from its offset.
int64_t reach(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  int64_t last = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    int64_t step = 0;
    if (sizes[i] == 0) {
      return 0;
    }
    if (__builtin_mul_overflow(sizes[i] - 1, strides[i], &step) ||
        __builtin_add_overflow(last, step, &last)) {
      throw DataError("its sizes and strides are out of range");
    }
  }
  return last + 1;
}

at::Tensor tensor_in(const at::Storage& storage, const nlohmann::json& meta) {
  const auto dtype = scalar_type(meta.at("dtype"));
  const auto sizes = whole_numbers(meta.at("sizes"), "a size");
  const auto strides = whole_numbers(meta.at("strides"), "a stride");
  const auto offset = whole_number(meta.at("storage_offset").at("as_int"), 0, "the offset");
  if (layout(meta.at("layout")) != at::kStrided || sizes.size() != strides.size() ||
      sizes.size() > 64) {
    throw DataError("it is no dense tensor");
  }
  int64_t end = 0, bytes = 0;
  const auto elements = reach(sizes, strides);
  if (__builtin_add_overflow(elements, offset, &end) ||
      __builtin_mul_overflow(end, static_cast<int64_t>(c10::elementSize(dtype)), &bytes) ||
      (elements > 0 && bytes > static_cast<int64_t>(storage.nbytes()))) {
    throw DataError(concat("its entry has ", storage.nbytes(), " bytes, too few for the sizes ",
                           at::IntArrayRef(sizes)));
  }
  return at::empty({0}, at::dtype(dtype)).set_(storage, offset, sizes, strides);
}

// Writes each element of an expanded tensor once.
void copy_elements(at::Tensor from, at::Tensor to) {
  for (int64_t dimension = 0; dimension < to.dim(); ++dimension) {
    if (to.stride(dimension) == 0 && to.size(dimension) > 1) {
      from = from.narrow(dimension, 0, 1);
      to = to.narrow(dimension, 0, 1);
    }
  }
  to.copy_(from);
}

std::string weights_table(const std::string& program) {
  return concat(kWeights, program, "_weights_config.json");
}

// The table of weights, in which parameters have a gradient where `tensors` have. Its order stays.
std::string frozen_like(const std::string& table, const TensorMap& tensors) {
  auto json = parse_bounded_json<nlohmann::ordered_json>(table, kMaxJsonDepth);
  for (auto& [name, payload] : json.at("config").items()) {
    if (payload.at("is_param").get<bool>()) {
      payload.at("tensor_meta").at("requires_grad") = tensors.at(name).requires_grad();
    }
  }
  return json.dump();
}

}  // namespace

Pt2Archive::Pt2Archive(const std::string& path) : path_(path) {
  const auto bytes = file_bytes(path);
  try {
    reader_ = std::make_unique<caffe2::serialize::PyTorchStreamReader>(path);
    sizes_ = entry_sizes(*reader_, bytes);
  } catch (const c10::Error& error) {
    refuse(path, concat("it is no zip archive of PyTorch (", error.what_without_backtrace(), ')'));
  } catch (const DataError& error) {
    refuse(path, error.what());
  }
  const auto format = has("archive_format") ? text("archive_format", 16) : "";
  if (format != "pt2") {
    refuse(path, "it is not an archive of torch.export");
  }
  if (const auto version = text("archive_version", 16); version != "0") {
    refuse(path, concat("it has version ", printable(version),
                        " of the archive format, and this libddp reads 0"));
  }
  if (has("byteorder") && text("byteorder", 16) != "little") {
    refuse(path, "its byte order is not little-endian");
  }
}

std::vector<std::string> Pt2Archive::programs() const {
  constexpr std::string_view kFolder = "models/", kEnd = ".json";
  std::vector<std::string> names;
  for (const auto& [entry, size] : sizes_) {
    if (entry.starts_with(kFolder) && entry.ends_with(kEnd) &&
        entry.size() > kFolder.size() + kEnd.size()) {
      names.push_back(entry.substr(kFolder.size(), entry.size() - kFolder.size() - kEnd.size()));
    }
  }
  return names;
}

std::string Pt2Archive::text(const std::string& entry, std::size_t max_bytes) {
  const auto found = sizes_.find(entry);
  if (found == sizes_.end()) {
    throw DataError(concat(path_, " lacks the entry ", printable(entry)));
  }
  if (found->second > max_bytes) {
    throw DataError(concat(path_, ": the entry ", printable(entry), " has ", found->second,
                           " bytes, and the limit is ", max_bytes));
  }
  std::string text(found->second, '\0');
  try {
    reader_->getRecord(entry, text.data(), text.size());
  } catch (const c10::Error& error) {
    refuse(path_, concat("its entry ", printable(entry), " is damaged (",
                         error.what_without_backtrace(), ')'));
  }
  return text;
}

TensorMap Pt2Archive::weights(const std::string& program) {
  return tensors(kWeights, weights_table(program));
}

TensorMap Pt2Archive::constants(const std::string& program) {
  constexpr const char* kConstants = "data/constants/";
  return tensors(kConstants, concat(kConstants, program, "_constants_config.json"));
}

TensorMap Pt2Archive::tensors(const std::string& folder, const std::string& table) {
  TensorMap result;
  const auto json = parse_bounded_json<nlohmann::json>(text(table, kMaxTableBytes), kMaxJsonDepth);
  for (const auto& [name, payload] : json.at("config").items()) {
    try {
      if (payload.at("use_pickle").get<bool>()) {
        throw DataError(
            "it is pickled, and libddp unpickles nothing; fix: export a model whose "
            "tensors are plain");
      }
      const auto entry = folder + payload.at("path_name").get<std::string>();
      const auto& meta = payload.at("tensor_meta");
      auto tensor = tensor_in(storage(entry), meta);
      if (tensor.scalar_type() == at::kBool) {
        check_bools(entry);
      }
      if (payload.at("is_param").get<bool>() && meta.at("requires_grad").get<bool>()) {
        tensor.set_requires_grad(true);
      }
      result.emplace(name, std::move(tensor));
    } catch (const std::exception& error) {
      throw DataError(concat(path_, ": tensor ", printable(name), ": ", message_of(error)));
    }
  }
  return result;
}

// Over storages_.
void Pt2Archive::overwrite_weights(const std::string& program, const TensorMap& new_tensors) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : weights(program)) {
    const auto found = new_tensors.find(name);
    if (found == new_tensors.end() || found->second.sizes() != tensor.sizes()) {
      throw DataError(concat(
          path_, " has the tensor ", printable(name), " of ", tensor.sizes(), ", and the module ",
          found == new_tensors.end() ? "lacks it" : concat("has one of ", found->second.sizes()),
          "; fix: leave the file as it was when the module was read"));
    }
    copy_elements(found->second, tensor.detach());
  }
}

std::string Pt2Archive::with_weights(const std::vector<std::string>& programs,
                                     const TensorMap& new_tensors) {
  std::map<std::string, std::string> tables;
  for (const auto& program : programs) {
    overwrite_weights(program, new_tensors);
    const auto entry = weights_table(program);
    tables[entry] = frozen_like(text(entry, kMaxTableBytes), new_tensors);
  }
  std::string bytes;
  bytes.reserve(file_bytes(path_) + kMaxTableGrowth);
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, std::size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  for (const auto& [entry, size] : sizes_) {
    const auto table = tables.find(entry);
    if (const auto changed = storages_.find(entry); changed != storages_.end()) {
      writer.writeRecord(entry, changed->second.data(), size);
    } else if (table != tables.end()) {
      writer.writeRecord(entry, table->second.data(), table->second.size());
    } else if (!entry.starts_with(".data/") && entry != "version") {  // these are the writer's own
      const auto record = text(entry, size);
      writer.writeRecord(entry, record.data(), record.size());
    }
  }
  writer.writeEndOfFile();
  return bytes;
}

void Pt2Archive::check_bools(const std::string& entry) {
  const auto& storage = storages_.at(entry);
  if (checked_bools_.insert(entry).second &&
      !are_bools(static_cast<const unsigned char*>(storage.data()), storage.nbytes())) {
    throw DataError("a truth value is neither 0 nor 1");
  }
}

at::Storage Pt2Archive::storage(const std::string& entry) {
  const auto found = storages_.find(entry);
  if (found != storages_.end()) {
    return found->second;
  }
  const auto size = sizes_.find(entry);
  if (size == sizes_.end()) {
    throw DataError("the entry " + printable(entry) + " is missing");
  }
  const auto bytes = at::empty({static_cast<int64_t>(size->second)}, at::kByte);
  reader_->getRecord(entry, bytes.mutable_data_ptr(), size->second);
  return storages_.emplace(entry, bytes.storage()).first->second;
}

}  // namespace ddp::detail
