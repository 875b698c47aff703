// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Exception.h>
#include <sys/sysinfo.h>

#include <new>

#include "ddp/core/error.hpp"
#include "models/pretrained/hf_config.hpp"

namespace models {
namespace {

using ddp::concat;

// Counts matrices alone, in double: config.json may hold sizes whose product exceeds int64.
double num_parameters(const Qwen2Options& options) {
  const auto width = static_cast<double>(options.hidden_size);
  const auto heads = static_cast<double>(2 * options.num_heads + 2 * options.num_kv_heads);
  const double layer = width * (heads * static_cast<double>(options.head_dim) +
                                3 * static_cast<double>(options.intermediate_size));
  return static_cast<double>(options.num_layers) * layer +
         (options.tie_word_embeddings ? 1 : 2) * width * static_cast<double>(options.vocab_size);
}

double num_parameters(const Gpt2Options& options) {
  const auto width = static_cast<double>(options.hidden_size);
  const double inner =
      options.intermediate_size > 0 ? static_cast<double>(options.intermediate_size) : 4 * width;
  return static_cast<double>(options.num_layers) * width * (4 * width + 2 * inner) +
         width * static_cast<double>(options.vocab_size + options.max_positions);
}

double num_parameters(const BertOptions& options) {
  const auto width = static_cast<double>(options.hidden_size);
  const double layer = width * (4 * width + 2 * static_cast<double>(options.intermediate_size));
  const auto rows =
      static_cast<double>(options.vocab_size + options.max_positions + options.num_token_types);
  return static_cast<double>(options.num_layers) * layer + width * (rows + width);
}

std::string needs_text(const HfConfig& config, const torch::TensorOptions& tensor_options,
                       double bytes) {
  return concat("a ", config.model_type, " model of ", bytes / 1e9, " GB of parameters (",
                c10::toString(c10::typeMetaToScalarType(tensor_options.dtype())), ")");
}

[[noreturn]] void refuse_memory(const std::string& needs, const std::string& why) {
  throw ddp::SettingsError(needs + " cannot be created: " + why +
                           "; fix: check the sizes in its config.json, or use bf16 or a larger "
                           "device");
}

}  // namespace

std::shared_ptr<LanguageModel> make_language_model(const HfConfig& config,
                                                   const torch::TensorOptions& tensor_options) {
  const double bytes =
      std::visit([](const auto& options) { return num_parameters(options); }, config.options) *
      static_cast<double>(tensor_options.dtype().itemsize());
  const auto needs = needs_text(config, tensor_options, bytes);
  // Linux overcommits memory and kills the process that touches too much of it.
  struct sysinfo machine {};
  if (tensor_options.device().is_cpu() && ::sysinfo(&machine) == 0) {
    const double there = (static_cast<double>(machine.totalram) + machine.totalswap) *
                         static_cast<double>(machine.mem_unit);
    if (bytes > there) {
      refuse_memory(needs, concat("this machine has ", there / 1e9, " GB of memory"));
    }
  }
  try {
    if (const auto* qwen2 = std::get_if<Qwen2Options>(&config.options)) {
      return std::make_shared<Qwen2Impl>(*qwen2, tensor_options);
    }
    if (const auto* bert = std::get_if<BertOptions>(&config.options)) {
      return std::make_shared<BertImpl>(*bert, tensor_options);
    }
    return std::make_shared<Gpt2Impl>(std::get<Gpt2Options>(config.options), tensor_options);
  } catch (const std::invalid_argument& error) {  // the caller may pass unchecked sizes
    throw ddp::SettingsError(error.what());
  } catch (const c10::Error& error) {
    refuse_memory(needs, error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    refuse_memory(needs, "this machine is out of memory");
  }
}

std::shared_ptr<CausalLm> make_causal_lm(const HfConfig& config,
                                         const torch::TensorOptions& tensor_options) {
  if (std::holds_alternative<BertOptions>(config.options)) {
    throw ddp::SettingsError("a model of model_type \"" + config.model_type +
                             "\" is not causal: it cannot predict the next token; fix: use a "
                             "model of type qwen2, llama, mistral or gpt2");
  }
  return std::static_pointer_cast<CausalLm>(make_language_model(config, tensor_options));
}

}  // namespace models
