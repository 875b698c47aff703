// SPDX-License-Identifier: Apache-2.0
// Writes docs/configuration.md from the code, or checks that the file is up to date.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "core/files/file_ops.hpp"
#include "core/settings/setting_row.hpp"
#include "ddp/train/command_line.hpp"
#include "ddp/train/config.hpp"
#include "exported/exported_settings.hpp"
#include "images/model_options.hpp"
#include "images/vit_settings.hpp"
#include "language/language_options.hpp"
#include "language/language_sections.hpp"
#include "tensors/cnn_settings.hpp"

namespace {

constexpr const char* kUsage = R"(usage: configuration_docs [--check] FILE

Writes the page docs/configuration.md from the code. --check only compares FILE with the code, and
returns 1 if they differ.
)";

constexpr const char* kIntroduction = R"(# Configuration

This page is generated from the code by `tools/configuration_docs`. Change the options structs, not this page.

A program that uses `ddp::run` or `ddp::Config` takes one YAML file and then `key=value` overrides:

```
resnet_ddp --config examples/configs/cifar10_resnet18_cifar_stem.yaml train.batch_size=128 train.epochs=12
```

- Keys are nested in the file: `train:` and below it `batch_size: 128`. The file may have 1 MiB and 32 levels.
  Aliases, anchors, tags, and keys or sections that occur twice are refused.
- A later override wins over an earlier one, and every override wins over the file.
- Lists are written `[30, 60]`, in overrides also `30,60`. Booleans are `true` and `false` (also `yes`, `no`, `on`,
  `off`). `inf` is accepted as a number, `nan` is refused.
- An unknown key, a wrong type or a value out of range ends the program with exit code 64 before anything starts. The
  message names the file and line (or the argument), the allowed values and the nearest key.
- `--help` prints options and the most used settings, `--help train` the settings of a section, `--help train.epochs`
  one setting, and `--help all` every setting of the program. On a terminal they are shown by `$PAGER`, or by `less`.
- A setting without effect also ends the program with 64, at the latest in the first step. A section has an effect if
  the program passed its options to an object of the library.
- Some fields need a training loop: `train.grad_accum_steps`, `max_grad_norm`, `non_finite`, `label_smoothing`,
  `mixup`, `cutmix`, `cuda_graph`, `replay_check_every`, `eval_…`. They exist only if the program declares them:
  `ddp::run(argc, argv, train, {ddp::uses({"train.max_grad_norm"})})`.
- A program may declare its own sections, `ddp::declare_section<T>("mine")`, and reads them by `cfg.section<T>("mine")`.
  `run` and `model` below belong to examples/resnet_ddp. The sections of vit_ddp, cnn_ddp, lora_ddp, gpt2_ddp, bert_ddp
  and exported_ddp (examples/) follow at the end, with the library's settings whose default differs there.
- At the start, rank 0 prints the settings that differ from their defaults, with `--show-settings` all. The run folder
  and every checkpoint store all of them. They must be equal on all ranks.
- `--summary` prints the parameters of each model that is wrapped with `cfg.ddp`: modules, shapes, numbers, memory.
  Then the program trains as usual. Parameters that it freezes after wrapping appear as trained.

## Shell completion

Programs that use `ddp::run` print a completion script for bash or zsh. It completes options, keys, allowed values, file
names, and what `--help` explains. Load it in one shell, or store it for all shells. zsh needs `compinit` first.

```
source <(build/examples/resnet_ddp --completion bash)     # bash, this shell
build/examples/resnet_ddp --completion bash >~/.local/share/bash-completion/completions/resnet_ddp
source <(build/examples/resnet_ddp --completion zsh)      # zsh, this shell
build/examples/resnet_ddp --completion zsh >~/.zfunc/_resnet_ddp      # ~/.zfunc is a folder of $fpath
```
)";

const ddp::SettingRow* find_row(const ddp::SettingRows& rows, const std::string& key) {
  const auto found = std::find_if(rows.begin(), rows.end(),
                                  [&](const ddp::SettingRow& row) { return row.key == key; });
  return found == rows.end() ? nullptr : &*found;
}

/// Describes the sections that a program adds to the library's, and its changes to those.
std::string program_sections(const std::string& program,
                             const std::vector<ddp::Section>& sections) {
  const auto library = ddp::Config::default_rows({ddp::uses({"train"})});
  const auto rows = ddp::Config::default_rows(sections);
  ddp::SettingRows custom;
  std::string changed, unused;
  for (const auto& row : rows) {
    const auto* const usual = find_row(library, row.key);
    if (usual == nullptr) {
      custom.push_back(row);
    } else if (usual->text() != row.text()) {
      changed += "| `" + row.key + "` | `" + row.text() + "` |\n";
    }
  }
  for (const auto& row : library) {
    const auto section = row.key.substr(0, row.key.find('.') + 1);
    const bool has_section = std::any_of(rows.begin(), rows.end(), [&](const auto& other) {
      return other.key.starts_with(section);
    });
    const auto name = has_section ? row.key : section + '*';
    if (find_row(rows, row.key) == nullptr && unused.find(name) == std::string::npos) {
      unused += (unused.empty() ? "`" : ", `") + name + '`';
    }
  }
  std::string text = "\n# Sections of " + program + "\n" + ddp::settings_markdown(custom);
  if (!changed.empty()) {
    text +=
        "\n## Different defaults of " + program + "\n\n| key | default |\n|---|---|\n" + changed;
  }
  if (!unused.empty()) {
    text += "\nThis program refuses these settings: " + unused + ".\n";
  }
  return text;
}

std::string read_all(const std::string& path) {
  std::string why;
  return ddp::detail::read_start(path, SIZE_MAX, why).value_or("");
}

}  // namespace

int main(int argc, char** argv) {
  if (ddp::answer_command_line(argc, argv, kUsage)) {
    return 0;
  }
  const bool check = argc == 3 && std::string(argv[1]) == "--check";
  if (argc != 2 && !check) {
    std::fputs(kUsage, stderr);
    return 64;
  }
  const char* path = argv[argc - 1];
  const std::string page =
      kIntroduction +
      ddp::settings_markdown(ddp::Config::default_rows(examples::resnet_sections())) +
      program_sections("vit_ddp", examples::vit_sections()) +
      program_sections("cnn_ddp", examples::cnn_sections()) +
      program_sections("lora_ddp", examples::lora_sections()) +
      program_sections("gpt2_ddp", examples::gpt2_sections()) +
      program_sections("bert_ddp", examples::bert_sections()) +
      program_sections("exported_ddp", examples::exported_sections());
  if (check) {
    if (read_all(path) == page) {
      return 0;
    }
    std::fprintf(stderr, "%s is out of step with the code; fix: configuration_docs %s\n%s\n", path,
                 path, ddp::first_difference(read_all(path), page).c_str());
    return 1;
  }
  try {
    ddp::replace_file(ddp::system_file_ops(), path, {page});
  } catch (const ddp::WriteError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 73;
  }
  return 0;
}
