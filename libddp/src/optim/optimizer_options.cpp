// SPDX-License-Identifier: Apache-2.0
#include "ddp/optim/make_optimizer.hpp"

#include <cmath>
#include <sstream>

#include "core/settings/parse_number.hpp"
#include "ddp/core/error.hpp"
#include "optim/parameter_settings.hpp"

namespace ddp {
namespace {

double number_in(const std::string& group_text, std::string_view text) {
  const auto value = detail::parse_number<double>(text);
  if (!value) {
    throw SettingsError(
        concat("optimizer.groups: \"", text, "\" in \"", group_text, "\" is not a number"));
  }
  return *value;
}

// "PATTERN[,PATTERN…] lr_scale=0.1 weight_decay=0": adds one item to the group and returns whether
// the item ends the group. An item of patterns alone continues in the next item. So commas inside
// an item and between items are equivalent: overrides are split at every comma.
bool parse_item(const std::string& text, ParameterGroup& group) {
  std::istringstream words(text);
  std::string word;
  words >> word;
  std::istringstream patterns(word);
  for (std::string pattern; std::getline(patterns, pattern, ',');) {
    if (!pattern.empty()) {
      group.patterns.push_back(pattern);
    }
  }
  bool ends = false;
  while (words >> word) {
    ends = true;
    const auto equals = word.find('=');
    const std::string key = word.substr(0, equals);
    if (equals == std::string::npos || (key != "lr_scale" && key != "weight_decay")) {
      throw SettingsError(concat("optimizer.groups: \"", word, "\" in \"", text,
                                 "\" is not lr_scale=NUMBER or weight_decay=NUMBER"));
    }
    const double value = number_in(text, word.substr(equals + 1));
    if (key == "lr_scale") {
      group.lr_scale = value;
    } else {
      group.weight_decay = value;
    }
  }
  return ends;
}

std::vector<ParameterGroup> parse_groups(const std::vector<std::string>& texts) {
  std::vector<ParameterGroup> groups;
  bool open = false;
  for (const std::string& text : texts) {
    if (!open) {
      groups.emplace_back();
    }
    open = !parse_item(text, groups.back());
  }
  if (open) {
    throw SettingsError(concat("optimizer.groups: \"", texts.back(),
                               "\" names parameters and no setting; fix: end a group with "
                               "lr_scale=NUMBER or weight_decay=NUMBER, for example \"",
                               texts.back(), " lr_scale=1\""));
  }
  return groups;
}

// The shortest text that parses to the same double.
std::string shortest(double value) {
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return std::string(buffer, end);
}

std::string format_group(const ParameterGroup& group) {
  std::string text;
  for (const std::string& pattern : group.patterns) {
    text += (text.empty() ? "" : ",") + pattern;
  }
  if (group.lr_scale != 1.0 || !group.weight_decay) {
    text += " lr_scale=" + shortest(group.lr_scale);
  }
  if (group.weight_decay) {
    text += " weight_decay=" + shortest(*group.weight_decay);
  }
  return text;
}

void describe_groups(std::vector<ParameterGroup>& groups, FieldVisitor& visitor) {
  std::vector<std::string> texts;
  for (const ParameterGroup& group : groups) {
    texts.push_back(format_group(group));
  }
  const std::vector<std::string> before = texts;
  visitor.field({.name = "groups",
                 .doc = "Groups of parameters with their own settings, each \"PATTERN[,PATTERN...] "
                        "lr_scale=0.1 weight_decay=0\" with at least one of the two. A parameter "
                        "belongs to the first group that matches."},
                texts);
  if (texts != before) {
    groups = parse_groups(texts);
  }
}

[[noreturn]] void fail_optimizer(const std::string& setting, double value,
                                 const std::string& limit) {
  throw SettingsError(concat("optimizer.", setting, " is ", value, ": ", limit));
}

void require_not_negative(const std::string& setting, double value) {
  if (!(value >= 0.0 && std::isfinite(value))) {
    fail_optimizer(setting, value, "must be finite and 0 or more");
  }
}

void require_beta(const std::string& setting, double value) {
  if (!(value >= 0.0 && value < 1.0)) {
    fail_optimizer(setting, value, "must be at least 0 and below 1");
  }
}

}  // namespace

std::vector<std::string> MuonOptions::first_and_last_layers() {
  return {"*embed*",
          "*wte.weight",
          "*wpe.weight",
          "*_token",
          "*shared.weight",
          "conv1.weight",
          "conv_proj.*",
          "*stem*",
          "fc.*",
          "head.*",
          "heads.*",
          "*lm_head*",
          "*classifier*",
          "score.weight",
          "qa_outputs.*",
          "*predictions.decoder.*",
          "features.0.*",
          "features.conv0.*",
          "*layer_scale*",
          "*relative*bias*",
          "*seq_relationship*"};
}

void describe_fields(MuonOptions& o, FieldVisitor& v) {
  v.field({.name = "momentum",
           .doc = "Decay of the running mean of a matrix's gradients.",
           .min = 0.0,
           .max = 1.0},
          o.momentum);
  v.field({.name = "nesterov", .doc = "Use Nesterov momentum."}, o.nesterov);
  v.field({.name = "ns_steps", .doc = "Newton-Schulz steps per update.", .min = 1, .max = 99},
          o.ns_steps);
  v.field({.name = "scale",
           .doc = "Factor of the learning rate. match_rms_adamw: 0.2 sqrt(max(rows, cols)), for "
                  "learning rates of AdamW. original: sqrt(max(1, rows / cols))."},
          o.scale,
          {{"match_rms_adamw", MuonScale::MatchRmsAdamW}, {"original", MuonScale::Original}});
  v.field({.name = "adamw_parameters",
           .doc = "Shell patterns of the names of matrices that AdamW updates: embeddings, first "
                  "and last layers."},
          o.adamw_parameters);
}

void describe_fields(OptimizerOptions& o, FieldVisitor& v) {
  v.field({.name = "type",
           .doc = "Update rule, as in torch.optim. lars: arXiv:1708.03888. lamb: arXiv:1904.00962. "
                  "muon: docs/muon.md.",
           .common = true},
          o.type,
          {{"sgd", OptimizerType::Sgd},
           {"adam", OptimizerType::Adam},
           {"adamw", OptimizerType::AdamW},
           {"lars", OptimizerType::Lars},
           {"lamb", OptimizerType::Lamb},
           {"muon", OptimizerType::Muon}});
  v.field({.name = "weight_decay",
           .doc = "Weight decay. sgd, adam, lars: added to the gradient. Others: decoupled.",
           .min = 0.0},
          o.weight_decay);
  v.field({.name = "decay_norm_and_bias",
           .doc = "Apply weight decay also to parameters with one dimension."},
          o.decay_norm_and_bias);
  v.field({.name = "momentum", .doc = "sgd, lars: momentum factor.", .min = 0.0}, o.momentum);
  v.field({.name = "dampening", .doc = "sgd: dampening of momentum."}, o.dampening);
  v.field({.name = "nesterov", .doc = "sgd: use Nesterov momentum; needs momentum."}, o.nesterov);
  v.field({.name = "beta1",
           .doc = "adam, adamw, lamb, muon: decay of the running mean.",
           .min = 0.0,
           .max = 1.0},
          o.beta1);
  v.field({.name = "beta2",
           .doc = "adam, adamw, lamb, muon: decay of the running mean square.",
           .min = 0.0,
           .max = 1.0},
          o.beta2);
  v.field({.name = "eps", .doc = "All but sgd: added to the denominator.", .min = 0.0}, o.eps);
  v.field(
      {.name = "amsgrad", .doc = "adam, adamw, muon: divide by the largest mean square so far."},
      o.amsgrad);
  v.field({.name = "trust_coefficient",
           .doc = "lars: factor of the ratio between the norms of weight and gradient.",
           .min = 0.0},
          o.trust_coefficient);
  v.field({.name = "adapt_norm_and_bias",
           .doc = "lars, lamb: use a trust ratio also for parameters with one dimension."},
          o.adapt_norm_and_bias);
  v.section("muon", o.muon);
  v.field({.name = "implementation",
           .doc = "flat: one kernel over all parameters. list: ATen's kernels over lists of "
                  "tensors. auto: flat on CUDA if it supports the parameters."},
          o.implementation,
          {{"auto", OptimizerImplementation::Auto},
           {"flat", OptimizerImplementation::Flat},
           {"list", OptimizerImplementation::List}});
  v.field({.name = "zero1",
           .doc = "ZeRO-1: each rank keeps the state of its part of the weights and updates that "
                  "part. For sgd, adam and adamw."},
          o.zero1);
  describe_groups(o.groups, v);
}

void detail::validate(const OptimizerOptions& o) {
  require_not_negative("weight_decay", o.weight_decay);
  require_not_negative("momentum", o.momentum);
  require_not_negative("eps", o.eps);
  require_beta("beta1", o.beta1);
  require_beta("beta2", o.beta2);
  if (o.nesterov && (o.momentum <= 0.0 || o.dampening != 0.0)) {
    throw SettingsError(concat("optimizer.nesterov needs optimizer.momentum > 0 (is ", o.momentum,
                               ") and optimizer.dampening = 0 (is ", o.dampening, ")"));
  }
  require_beta("muon.momentum", o.muon.momentum);
  if (o.muon.ns_steps < 1 || o.muon.ns_steps > 99) {
    fail_optimizer("muon.ns_steps", static_cast<double>(o.muon.ns_steps), "must be 1 to 99");
  }
  if (o.type == OptimizerType::Lars && !(o.trust_coefficient > 0.0)) {
    fail_optimizer("trust_coefficient", o.trust_coefficient, "must be more than 0");
  }
  for (const ParameterGroup& group : o.groups) {
    if (group.patterns.empty()) {
      throw SettingsError("optimizer.groups: a group has no pattern; name parameters, as \"fc.*\"");
    }
    require_not_negative("groups: lr_scale", group.lr_scale);
    require_not_negative("groups: weight_decay", group.weight_decay.value_or(0.0));
  }
}

}  // namespace ddp
