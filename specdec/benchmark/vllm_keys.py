"""The options by which vLLM drafts and accepts, on GPUs and on TPUs."""

import json
from collections.abc import Sequence
from typing import Any

from specdec.acceptance.synthetic import prefix_acceptance
from specdec.benchmark import engine_keys
from specdec.benchmark.engine_keys import Handed, Order, Place, Rendered
from specdec.roofline.planning import BatchRange


def _rule(handed: Handed, warnings: list[str]) -> dict[str, Any]:
  copies = handed.kind in ("lookup", "suffix", "medusa")
  samples = not copies and handed.rule != "naive"
  drawn = samples and handed.temperature > 0
  keys = {
    "draft_sample_method": "probabilistic" if drawn else "greedy",
    "rejection_sample_method": "standard",
  }
  if handed.rule == "block":
    keys["rejection_sample_method"] = "block"
  elif handed.rule == "synthetic":
    keys["rejection_sample_method"] = "synthetic"
    arguments = handed.rule_arguments
    if (length := arguments["length"]) is not None:
      keys["synthetic_acceptance_length"] = length
    else:
      rates = prefix_acceptance(handed.k, **arguments)
      keys["synthetic_acceptance_rates"] = rates
  elif handed.rule != "rejection":
    has = "standard, block and synthetic"
    engine_keys.own_rule("vLLM", handed, warnings, has)
  return keys


def _config(order: Order) -> dict[str, Any]:
  method, handed, place, schedule, warnings = order
  config = {"method": method}
  if handed.kind == "lookup":
    least = handed.arguments["min_ngram"]
    config["prompt_lookup_max"] = handed.arguments["ngram"]
    config["prompt_lookup_min"] = max(1, 3 if least is None else least)
  elif handed.kind == "suffix":
    config |= _suffix(handed, warnings)
  else:
    config["model"] = place.drafter
  if handed.kind == "peagle":
    config["parallel_drafting"] = True
  config["num_speculative_tokens"] = handed.k
  if schedule:
    if not any(one.k for one in schedule):
      warnings.append("by the cost model no batch pays: decode without a draft")
    else:
      ranges = [list(one) for one in schedule]
      config["num_speculative_tokens_per_batch_size"] = ranges
  return config


def _suffix(handed: Handed, warnings: list[str]) -> dict[str, Any]:
  own = handed.arguments
  warnings.append(
    "vLLM's suffix decoding needs arctic-inference; its V2 model runner, which "
    "does not, always drafts k tokens and reads neither factor nor min_prob"
  )
  if own["corpus"] is not None:
    warnings.append(
      "vLLM copies from the answers that it gave, not from a file: corpus is "
      "left out"
    )
  # Its depth is the sum of what matches and what is drafted.
  return {
    "suffix_decoding_max_tree_depth": own["max_match"] + handed.k,
    "suffix_decoding_max_spec_factor": own["factor"],
    "suffix_decoding_min_token_prob": own["min_prob"],
  } | ({} if own["corpus"] else {"suffix_decoding_max_cached_requests": 0})


def vllm(order: Order) -> Rendered:
  """Renders what vLLM on GPUs is given."""
  handed, warnings = order.handed, order.warnings
  if handed.head is not None and handed.head.block:
    schedule = _block(handed, order.schedule, warnings)
    order = order._replace(schedule=schedule)
  if handed.kind == "peagle" and handed.head.feature_norm == "each":
    raise ValueError(
      "vLLM's P-EAGLE has no norm for each stream; train one with feature_norm "
      "= 'none' or 'joint'"
    )
  rule = _rule(handed, warnings)
  config = _config(order) | rule
  if handed.kind == "mtp":
    warnings.append(
      "vLLM 0.32 does not read MTP layers in speculators' layout; the package "
      "speculators does"
    )
  if handed.kind == "eagle" and handed.head.bias:
    warnings.append(
      "vLLM's EAGLE has no bias in fc and leaves it out: acceptance drops; "
      "train with bias = False"
    )
  return config, _command(order.place, config), {}


def _block(
  handed: Handed, schedule, warnings: list[str]
) -> Sequence[BatchRange] | None:
  """Checks a block drafter; returns the schedule that it can have."""
  engine_keys.check_block("vLLM", handed, warnings)
  successor = handed.head.block.successor
  if handed.kind == "dspark" and successor != "markov":
    raise ValueError(
      f"vLLM's DSpark has a Markov head of type vanilla; this one has "
      f"successor = {successor!r}"
    )
  if handed.kind == "dflash2":
    warnings.append(
      "vLLM chooses among candidates in its V2 model runner alone, since pull "
      "request 52816; without, it drafts as a DFlash"
    )
  if handed.kind != "dflash":
    engine_keys.one_k(f"vLLM with a {handed.kind}", schedule, warnings)
    return None
  return schedule


def _command(place: Place, config: dict) -> list[str]:
  text = json.dumps(config, separators=(",", ":"))
  return ["vllm", "serve", place.target, "--speculative-config", text]


def vllm_tpu(order: Order) -> Rendered:
  """Renders what vLLM on TPUs is given, with tpu-inference's JAX models."""
  handed, warnings = order.handed, order.warnings
  if handed.rule not in ("rejection", "greedy"):
    engine_keys.own_rule("vLLM on TPUs", handed, warnings, "standard rejection")
  if handed.head is not None:
    engine_keys.check_first_eagle3("vLLM on TPUs", handed, fixed_layers=True)
  config = _config(order)
  if "num_speculative_tokens_per_batch_size" in config:
    warnings.append(
      "the runner on TPUs drafts num_speculative_tokens at every batch size, "
      "whatever the schedule says"
    )
  # It drafts the likeliest tokens at any temperature.
  config |= {
    "draft_sample_method": "greedy",
    "rejection_sample_method": "standard",
  }
  return config, _command(order.place, config), {}
