"""Inference engines: which drafters each has, and whose keys it is given.

Keys are those of the version or commit that stands in ENGINES, as its sources
or documentation have them. To add an engine, write its function in
engine_keys.py, beside vllm_keys.py, and an entry here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from specdec.benchmark import engine_keys, vllm_keys
from specdec.benchmark.engine_keys import Handed, Order, Place, Served
from specdec.roofline.planning import BatchRange


class Engine(NamedTuple):
  """An inference engine.

  Attributes:
    keys: whose keys are written.
    methods: its name for each kind of drafter that it has; of a block drafter
      that it is published under.
    layouts: of formats.WRITTEN, for each kind of head.
    trees: it drafts dynamic trees.
    render: of engine_keys.
  """

  keys: str
  methods: Mapping[str, str]
  layouts: Mapping[str, str]
  trees: bool
  render: Callable[[Order], engine_keys.Rendered]


ENGINES = {
  "vllm": Engine(
    "vllm-project/vllm, vllm/config/speculative.py at 002e77c1",
    {"lookup": "ngram", "model": "draft_model", "peagle": "eagle3"}
    | {kind: kind for kind in ("eagle", "eagle3", "mtp", "medusa", "suffix")}
    | {"dflash": "dflash", "dflash2": "dflash", "dspark": "dspark"},
    {"eagle": "eagle", "medusa": "medusa", "dflash": "dflash"}
    | {"dflash2": "dflash"}
    | {kind: "speculators" for kind in ("dspark", "eagle3", "mtp", "peagle")},
    False,
    vllm_keys.vllm,
  ),
  "vllm-tpu": Engine(
    "vllm-project/tpu-inference at b8692ff, flax_nnx",
    {"lookup": "ngram", "eagle3": "eagle3"},
    {"eagle3": "eagle"},
    False,
    vllm_keys.vllm_tpu,
  ),
  "sglang": Engine(
    "sgl-project/sglang, its speculative_decoding.md at 067ad4d; of DFLASH "
    "z-lab/dflash, its README.md at 0a2da23",
    {"lookup": "NGRAM", "model": "STANDALONE"}
    | {"eagle": "EAGLE", "eagle3": "EAGLE3"}
    | {"dflash": "DFLASH", "dflash2": "DFLASH"},
    {"eagle": "eagle", "eagle3": "eagle"}
    | {"dflash": "dflash", "dflash2": "dflash"},
    True,
    engine_keys.sglang,
  ),
  "sglang-jax": Engine(
    "sgl-project/sglang-jax, python/sgl_jax/srt/server_args.py at cddbf6f1",
    {"eagle3": "EAGLE3"},
    {"eagle3": "eagle"},
    False,
    engine_keys.sglang_jax,
  ),
  "tensorrt-llm": Engine(
    "NVIDIA/TensorRT-LLM 1.4.0rc1, tensorrt_llm/llmapi/llm_args.py",
    {"lookup": "NGram", "model": "DraftTarget", "eagle3": "Eagle3"},
    {"eagle3": "eagle"},
    True,
    engine_keys.tensorrt_llm,
  ),
}


def serve(
  engine: str,
  handed: Handed,
  place: Place,
  schedule: Sequence[BatchRange] | None = None,
) -> Served:
  """Returns what one of ENGINES is given, or raises ValueError with what it
  refuses. Without a schedule there is one k."""
  entry, warnings = ENGINES[engine], []
  if handed.kind not in entry.methods:
    raise ValueError(
      f"{engine} has no drafter {handed.kind}; it has "
      f"{', '.join(sorted(entry.methods))}"
    )
  if handed.tree and not entry.trees:
    raise ValueError(f"{engine} drafts chains only; give --shape=chain")
  method = entry.methods[handed.kind]
  order = Order(method, handed, place, schedule, warnings)
  config, command, environment = entry.render(order)
  if handed.rule == "synthetic":
    warnings.append("synthetic acceptance: the engine's text is meaningless")
  return Served(config, tuple(command), environment, tuple(warnings))
