"""Counts the experts of a mixture that the tokens of one pass choose.

  python scripts/count_experts.py --target=DIR
  python scripts/count_experts.py --target=DIR --prompt_file=texts.jsonl \\
    --samples=64 --context=256 --tokens=1,2,4,8,16,32

A pass reads an expert once, however many of its tokens choose it: verifying
k + 1 tokens of one text reads fewer experts than as many tokens of texts that
have nothing to do with each other. Both are counted on real text, without a
cache, and averaged over texts and layers; beside them the formula of the cost
model, E (1 - (1 - n/E)^(m^r)) for m tokens that choose n of E experts each. r =
1 is independent choice; the r that fits best is what roofline.py takes as
--correlation for this model.

busiest: the share of the choices that the layer's most popular expert has, the
mean over layers; 1/E where they are balanced.
"""

import numpy as np

from specdec.benchmark import expert_counts, results, rows
from specdec.cli import app, setup_flags
from specdec.report import mixture_tables
from specdec.roofline.cost import experts_touched
from specdec.utils import terminal

_WITHOUT = (*setup_flags.DRAFTING, "temperature", "top_k", "top_p", "kv")
_WITHOUT += ("num_nodes",)
_SIZES = (1, 2, 3, 5, 9, 17, 33, 64)


def define(flags: app.Flags) -> None:
  setup_flags.define(flags, without=_WITHOUT)
  sizes = ", ".join(map(str, _SIZES))
  flags.integers(
    "tokens", None, f"Tokens of a pass, a,b,c. Default: of {sizes} what fits."
  )
  flags.integer("samples", 64, "Texts, the first tokens of each.")
  flags.integer("context", 256, "Tokens of every text.")


def count(options: app.Options) -> None:
  app.check_at_least(options, 1, "samples", "context", "tokens")
  setup_flags.read(options, drafter="none", k=0)
  if options.chat and not options.prompt_file:
    raise ValueError("--chat is for --prompt_file")
  most = min(options.samples, options.context)
  sizes = options.tokens or [size for size in _SIZES if size <= most]
  if max(sizes) > most:
    raise ValueError(
      f"--tokens={max(sizes)} with --samples={options.samples} and "
      f"--context={options.context}; give at most {most}"
    )
  setup = setup_flags.setup_of(options, k=0, drafter="none")
  if not setup.target_config().num_experts:
    raise ValueError(f"--target={options.target} is no mixture of experts")
  header = setup_flags.header(options, setup)
  checkpoint = setup.load_target(app.note, packed=False).checkpoint
  setup_flags.check_chat(options, checkpoint.tokenizer)
  source = rows.Source(
    checkpoint, options.prompt_file, options.chat, options.seed
  )
  texts = rows.make_rows(source, options.samples, options.context)
  config = checkpoint.config
  routes = expert_counts.routed(checkpoint, texts, setup.batch)
  counted = expert_counts.counts(routes, sizes)
  per_token, experts = config.experts_per_token, config.num_experts
  load = routes.mean((1, 2)) / per_token  # [layers, E], shares of the choices
  best = {
    name: expert_counts.correlation(
      counted, lambda x, name=name: getattr(x, name), experts, per_token
    )
    for name in ("of_one_text", "of_many_texts")
  }
  counts = {
    "experts": experts,
    "experts_per_token": per_token,
    "correlation": best,
    "busiest": float(np.mean(load.max(-1))),
    "touched": [
      {
        "tokens": x.tokens,
        "of_one_text": vars(x.of_one_text),
        "of_many_texts": vars(x.of_many_texts),
        "independent": experts_touched(experts, per_token, x.tokens, 1.0),
      }
      for x in counted
    ],
  }
  document = header | {"expert_counts": counts}
  if options.json:
    results.write_json(options.json, document)
  terminal.report(mixture_tables.of_experts(counts))
  for caveat in document["caveats"]:
    terminal.report(f"warning: {caveat}")


main = app.Program(__doc__, define, count)
