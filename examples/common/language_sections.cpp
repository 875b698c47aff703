// SPDX-License-Identifier: Apache-2.0
#include "common/language_sections.hpp"

#include "common/decode_prompts.hpp"
#include "common/language_options.hpp"
#include "common/sample_text.hpp"

namespace examples {

StreamOptions::StreamOptions() {
  path = "data/text-sample";
  layout = ddp::TokenLayout::Stream;
  max_seq_len = 256;
}

std::vector<ddp::Section> lora_sections() {
  return {ddp::declare_section<RunSettings>("run"), ddp::declare_section<Qwen2Settings>("model"),
          ddp::declare_section<LoraSettings>("lora"),
          ddp::declare_section<ddp::TokenDataOptions>("tokens"),
          ddp::declare_section<DecodeSettings>("decode")};
}

std::vector<ddp::Section> gpt2_sections() {
  return {ddp::declare_section<Gpt2Settings>("model"),
          ddp::declare_section<StreamOptions>("tokens"),
          ddp::declare_section<SampleSettings>("sample")};
}

}  // namespace examples
