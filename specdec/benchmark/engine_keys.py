"""The options by which each inference engine drafts and accepts.

What an engine refuses is a ValueError of one sentence; what it does otherwise
than this code is a warning. Whose keys these are stands in serving.ENGINES;
vLLM's are in vllm_keys.py.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specdec.checkpoints.formats import tables
from specdec.drafters.heads.head_config import HeadConfig
from specdec.roofline import planning
from specdec.roofline.planning import BatchRange


class Handed(NamedTuple):
  """A way of drafting and accepting, as engines see it."""

  kind: str  # lookup, suffix, model, or a head's, of a block its published one
  k: int
  arguments: Mapping[str, Any]  # of the drafter's call
  head: HeadConfig | None
  tree: Mapping[str, int] | None  # size and top of a dynamic tree; None: chain
  rule: str
  rule_arguments: Mapping[str, Any]
  lossless: bool
  temperature: float
  num_layers: int  # of the target


class Served(NamedTuple):
  """What one engine is given."""

  config: dict[str, Any]  # its JSON or YAML
  command: tuple[str, ...]
  environment: dict[str, str]
  warnings: tuple[str, ...]

  @property
  def shell(self) -> str:
    """The command line, quoted for a shell."""
    names = [f"{name}={value}" for name, value in self.environment.items()]
    return shlex.join([*(["env", *names] if names else ()), *self.command])


class Place(NamedTuple):
  """Where an engine finds things."""

  target: str
  drafter: str
  config: str  # a file with Served.config


class Order(NamedTuple):
  """What one engine is asked to serve; what it does otherwise is a warning."""

  method: str  # its name for the kind of drafter
  handed: Handed
  place: Place
  schedule: Sequence[BatchRange] | None  # the best k by batch size; None: one k
  warnings: list[str]  # to be added to


# The engine's JSON or YAML, its command line, environment variables.
Rendered = tuple[dict[str, Any], list[str], dict[str, str]]


def own_rule(name: str, handed: Handed, warnings: list[str], has: str) -> None:
  """Warns that an engine accepts by a lossless rule of its own."""
  if not handed.lossless:
    raise ValueError(
      f"{name} does not have the lossy rule {handed.rule}; it has {has}"
    )
  if not handed.temperature:  # any lossless rule gives the likeliest tokens
    return
  warnings.append(
    f"{handed.rule} is no rule of {name}, which has {has}: the text has the "
    "same distribution, not the same tokens, and acceptance may differ"
  )


def check_block(engine: str, handed: Handed, warnings: list[str]) -> None:
  """Refuses or warns of blocks of another size than a head's own."""
  levels, block = handed.head.levels, handed.head.block
  if handed.k == levels or block.causal:
    return
  if handed.kind != "dflash":
    raise ValueError(
      f"{engine} drafts as many tokens as slots of a block, and a "
      f"{handed.kind} wants all of its own: give k = {levels}"
    )
  warnings.append(
    f"{engine} cuts the block to {handed.k} draft tokens of the {levels} that "
    "it was trained for: acceptance may fall"
  )


def check_first_eagle3(
  engine: str, handed: Handed, fixed_layers: bool, residual: bool = True
) -> None:
  """Refuses what the EAGLE-3 of SafeAILab, the first, does not have.

  Args:
    fixed_layers: the engine reads the paper's three layers alone.
    residual: it knows norm_before_residual.
  """
  head = handed.head
  expected = {
    "feature_norm": "none", "feeds_back_norm": False, "num_layers": 1,
    "head": "own", "qk_norm": False, "qkv_bias": False,
  }  # fmt: skip
  if fixed_layers:
    expected["features"] = tables.default_layers(handed.num_layers)
  if not residual:
    expected["norm_before_residual"] = False
  for name, value in expected.items():
    if getattr(head, name) != value:
      raise ValueError(
        f"{engine} reads an EAGLE-3 with {name} = {value!r} only; this one has "
        f"{getattr(head, name)!r}"
      )


def _chain_flags(handed: Handed) -> dict[str, Any]:
  tree = handed.tree or {"size": handed.k, "top": 1}
  return {
    "speculative-num-steps": handed.k,
    "speculative-eagle-topk": tree["top"],
    "speculative-num-draft-tokens": tree["size"] + 1,  # the last token, too
  }


def _sglang_like(module: str, flags: dict, place: Place) -> list[str]:
  pairs = [(f"--{name}", str(value)) for name, value in flags.items()]
  command = ["python3", "-m", module, "--model-path", place.target]
  return command + [x for pair in pairs for x in pair]


def _environment(
  engine: str, handed: Handed, warnings: list[str], prefix: str
) -> dict[str, str]:
  """Returns the environment variables of synthetic(length=), if that is the
  rule; warns of rules that are not the engine's."""
  length = handed.rule_arguments.get("length")
  if handed.rule != "synthetic" or length is None:
    if handed.rule != "greedy":
      has = "one of its own, and synthetic(length=L)"
      own_rule(engine, handed, warnings, has)
    return {}
  return {
    f"{prefix}SIMULATE_ACC_LEN": f"{length:g}",
    f"{prefix}SIMULATE_ACC_METHOD": "match-expected",
    f"{prefix}SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
  }


def one_k(engine: str, schedule, warnings: list[str]) -> None:
  if schedule:
    warnings.append(f"{engine} drafts one k at all batches: no schedule")


def sglang(order: Order) -> Rendered:
  """Renders what SGLang is given."""
  method, handed, place, schedule, warnings = order
  environment = _environment("SGLang", handed, warnings, "SGLANG_")
  one_k("SGLang", schedule, warnings)
  flags = {"speculative-algorithm": method}
  if handed.kind == "lookup":
    if handed.tree:
      raise ValueError("SGLang's NGRAM is handed over as a chain only")
    flags["speculative-num-draft-tokens"] = handed.k + 1
    flags["speculative-ngram-max-bfs-breadth"] = 1
    warnings.append(
      "SGLang matches by a trie of its own: ngram and min_ngram are left out"
    )
  elif handed.head is not None and handed.head.block:
    if handed.tree:
      raise ValueError("SGLang's DFLASH is handed over as a chain only")
    check_block("SGLang", handed, warnings)
    flags["speculative-draft-model-path"] = place.drafter
    flags["speculative-num-draft-tokens"] = handed.k + 1
  else:
    if handed.kind == "eagle" and not handed.head.bias:
      raise ValueError(
        "SGLang's EAGLE has a bias in fc; train with bias = True"
      )
    flags["speculative-draft-model-path"] = place.drafter
    flags |= _chain_flags(handed)
  command = _sglang_like("sglang.launch_server", flags, place)
  return flags, command, environment


def sglang_jax(order: Order) -> Rendered:
  """Renders what SGLang-JAX is given."""
  method, handed, place, schedule, warnings = order
  environment = _environment("SGLang-JAX", handed, warnings, "")
  check_first_eagle3("SGLang-JAX", handed, True, residual=False)
  one_k("SGLang-JAX", schedule, warnings)
  flags = {"speculative-algorithm": method}
  flags["speculative-draft-model-path"] = place.drafter
  flags |= _chain_flags(handed)
  command = _sglang_like("sgl_jax.launch_server", flags, place)
  return flags, command, environment


def tensorrt_llm(order: Order) -> Rendered:
  """Renders what TensorRT-LLM is given."""
  method, handed, place, schedule, warnings = order
  config: dict[str, Any] = {"decoding_type": method, "max_draft_len": handed.k}
  environment, heads = {}, handed.kind == "eagle3"
  length = handed.rule_arguments.get("length")
  if handed.rule == "synthetic" and length is not None and length % 1 == 0:
    name = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"
    environment[name] = f"{length - 1:g}"
  elif handed.rule == "rejection" and heads:
    config["use_rejection_sampling"] = True
  elif handed.rule not in ("greedy", "naive"):
    has = "exact match, rejection sampling for Eagle3, and synthetic(length=N)"
    own_rule("TensorRT-LLM", handed, warnings, has + " of a whole number")
  if handed.kind == "lookup":
    config["max_matching_ngram_size"] = handed.arguments["ngram"]
    warnings.append("TensorRT-LLM has no min_ngram: it is left out")
  else:
    config["speculative_model"] = place.drafter
  if heads:
    check_first_eagle3("TensorRT-LLM", handed, False)
    features = handed.head.features  # it names the layer that a stream leaves
    layers = tables.layers_left(features)
    config["eagle3_layers_to_capture"] = list(layers)
  if handed.tree:
    size, top = handed.tree["size"], handed.tree["top"]
    if not (heads and handed.k <= size <= top * handed.k):
      raise ValueError(
        "TensorRT-LLM drafts dynamic trees with Eagle3 alone, of k to top x k "
        f"draft tokens; here {handed.kind}, {size} tokens, k = {handed.k}"
      )
    config |= {"use_dynamic_tree": True, "dynamic_tree_max_topK": top}
    config["max_total_draft_tokens"] = size
  elif schedule:
    try:
      config |= planning.as_tensorrt_llm(schedule)
    except ValueError as error:
      warnings.append(f"no schedule: {error}")
  whole: dict[str, Any] = {"speculative_config": config}
  if not heads:
    whole["disable_overlap_scheduler"] = True
  command = ["trtllm-serve", place.target, "--config", place.config]
  return whole, command, environment
