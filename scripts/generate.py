"""Completes prompts by speculative decoding and shows where each token is from.

  python scripts/generate.py               # models in the package: a first look
  python scripts/generate.py --draft=stdlib-0.3m --k=3 --temperature=0.8
  python scripts/generate.py --target=DIR --draft=DIR --acceptance=rejection
  python scripts/generate.py --target=smollm2-135m-instruct --chat \\
    --prompt='Why is it dark at night?'   # 98 MB once; drafts by prompt lookup
  python scripts/generate.py --prompt_file=prompts.jsonl --batch=4 --json=o.json
  python scripts/generate.py --html=page.html     # each token's story, to keep

Text is printed as it comes, tokens coloured by origin. Then the same prompts
are decoded plainly, in the same run, and a table sets the two side by side.
"""

import json
import logging
import pathlib
import sys

import jax
from absl import app, flags
from ml_collections import config_flags
from tqdm import tqdm

from specdec import (
  acceptance,
  checkpoints,
  display,
  drafters,
  memory,
  page,
  prompts,
  report,
  sampling,
  session,
)
from specdec.checkpoints import shipped
from specdec.checkpoints.fetch import PACKAGES, fetch
from specdec.models import transformer
from specdec.types import Params

RULES = {
  "coupled": acceptance.coupled,
  "greedy": acceptance.greedy,
  "rejection": acceptance.rejection,
}
DRAFTERS = ("lookup", "model")
# Tokens of a round: each guess of a model costs a pass of it, a copy nothing.
_DEFAULT_K = {"model": 3, "lookup": 5}

config_flags.DEFINE_config_file(
  "config", None, "File whose get_config() sets flags not given here."
)
_BEFORE = set(flags.FLAGS)
flags.DEFINE_string(
  "target",
  shipped.TARGET,
  "Model whose text is wanted: a directory in Hugging Face's or Orbax's "
  "layout, a .gguf file, a hub name, or one of "
  f"{', '.join([*shipped.names(), *PACKAGES])}.",
)
flags.DEFINE_string(
  "draft",
  None,
  f"Draft model, named like --target; {shipped.DRAFT} for {shipped.TARGET}.",
)
flags.DEFINE_enum(
  "drafter",
  None,
  DRAFTERS,
  "Who drafts; default model with --draft, else "
  "lookup: copying from prompt and output.",
)
flags.DEFINE_integer(
  "k",
  None,
  "Drafted tokens a round, 0 for none; default "
  + " and ".join(f"{k} with {name}" for name, k in _DEFAULT_K.items())
  + ".",
)
flags.DEFINE_integer("ngram", 5, "Lookup: longest match that is looked for.")
flags.DEFINE_integer("min_ngram", 3, "Lookup: shortest match worth a draft.")
flags.DEFINE_enum(
  "acceptance",
  "coupled",
  sorted(RULES),
  "coupled: token for token the text of plain sampling with this seed. "
  "rejection: the same law, other noise, accepts sampled drafts more often. "
  "greedy: temperature 0 only.",
)
flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
flags.DEFINE_integer("top_k", None, "Sample among the k likeliest tokens.")
flags.DEFINE_float("top_p", None, "Sample among the likeliest of this mass.")
flags.DEFINE_integer("seed", 0, "Of all noise; a prompt's number is mixed in.")
flags.DEFINE_string("prompt", None, "One prompt.")
flags.DEFINE_string(
  "prompt_file",
  None,
  "Text file (one prompt), or JSONL with prompt, text, turns or token_ids.",
)
flags.DEFINE_integer("max_new_tokens", 128, "A row stops here at the latest.")
flags.DEFINE_integer("batch", 1, "Prompts decoded together.")
flags.DEFINE_bool("chat", False, "Wrap prompts in the chat template.")
flags.DEFINE_multi_string("stop", [], "Text that ends an answer; repeatable.")
flags.DEFINE_enum("dtype", "float32", checkpoints.DTYPES, "Of the weights.")
flags.DEFINE_string("json", None, "Write token ids, text and numbers here.")
flags.DEFINE_string(
  "html",
  None,
  "Write a page here, one file for any browser and no network: the text by "
  "origin and round, each token's draft and target probability under the "
  "pointer, and the table.",
)
flags.DEFINE_enum(
  "color", "auto", ("auto", "always", "never"), "Colour tokens by origin."
)
flags.DEFINE_string(
  "compilation_cache",
  "~/.cache/specdec/xla",
  "Folder that keeps compiled programs between runs; '' for none.",
)
FLAGS = flags.FLAGS
FLAG_NAMES = sorted(set(FLAGS) - _BEFORE)  # those that --config may set


def apply_config() -> None:
  """Sets flags from --config, except those given on the command line."""
  for name, value in (FLAGS.config or {}).items():
    if name not in FLAG_NAMES:
      raise ValueError(
        f"--config sets {name!r}; accepted: {', '.join(FLAG_NAMES)}"
      )
    if not FLAGS[name].present:
      setattr(FLAGS, name, value)


def fill_in_flags() -> None:
  """Gives the flags that depend on others their defaults."""
  if FLAGS.target == shipped.TARGET and FLAGS.drafter != "lookup":
    FLAGS.draft = FLAGS.draft or shipped.DRAFT
  if FLAGS.drafter is None:
    FLAGS.drafter = "model" if FLAGS.draft else "lookup"
  if FLAGS.k is None:
    FLAGS.k = _DEFAULT_K[FLAGS.drafter]


def check_flags() -> None:
  """Refuses what cannot work, before anything long begins."""
  for name, low in (("k", 0), ("max_new_tokens", 1), ("batch", 1)):
    if getattr(FLAGS, name) < low:
      raise ValueError(f"--{name}={getattr(FLAGS, name)}; it must be >= {low}")
  sampling.settings(1, FLAGS.temperature, FLAGS.top_k, FLAGS.top_p)
  if FLAGS.acceptance == "greedy" and FLAGS.temperature > 0:
    raise ValueError(
      f"--acceptance=greedy at --temperature={FLAGS.temperature} would not "
      "sample; take coupled or rejection, or temperature 0"
    )
  if FLAGS.prompt is not None and FLAGS.prompt_file:
    raise ValueError("give --prompt or --prompt_file, not both")
  if FLAGS.drafter == "model" and not FLAGS.draft:
    raise ValueError("--drafter=model needs --draft, the model that drafts")
  if FLAGS.drafter == "lookup" and FLAGS.draft:
    raise ValueError("--drafter=lookup takes no --draft")
  if "" in FLAGS.stop:
    raise ValueError("--stop='' would end every answer; give some text")
  for name in ("json", "html"):
    if getattr(FLAGS, name):
      report.check_writable(f"--{name}", getattr(FLAGS, name))


def load_models():
  """Target and draft checkpoints, what they need of memory checked first."""
  paths = [fetch(name) for name in (FLAGS.target, FLAGS.draft) if name]
  configs = [checkpoints.inspect(path, FLAGS.dtype) for path in paths]
  longest = FLAGS.max_new_tokens + session.PROMPT_STEP
  check_memory(configs, longest)
  print(f"loading {', '.join(map(str, paths))}", file=sys.stderr)
  draft = paths[1] if FLAGS.draft else None
  models = checkpoints.load_pair(paths[0], draft, FLAGS.dtype)
  return [model and model.packed() for model in models]


def check_memory(configs, max_length: int) -> None:
  memory.check(
    configs[0],
    configs[1] if len(configs) > 1 else None,
    batch=FLAGS.batch,
    max_length=max_length,
    num_nodes=FLAGS.k + 1,
  )


def encode_prompts(target) -> list[list[int]]:
  """Token ids of what was asked, or of a first example."""
  if FLAGS.prompt_file:
    wanted = prompts.read(FLAGS.prompt_file)
  elif FLAGS.prompt is not None:
    wanted = [prompts.Prompt(text=FLAGS.prompt)]
  else:
    text = shipped.PROMPT.read_text()
    wanted = [prompts.Prompt(text=text)]
    print(f"no --prompt: completing\n\n{text}", file=sys.stderr)
  return prompts.encode(
    wanted, target.tokenizer, FLAGS.chat, target.config.vocab_size
  )


def make_session(target, draft, encoded) -> session.Session:
  """The run's models, drafter and rule, not yet compiled."""
  if draft:
    drafter = drafters.model(transformer.model(draft.config), FLAGS.k)
  else:
    drafter = drafters.lookup(
      FLAGS.k, ngram=FLAGS.ngram, min_ngram=FLAGS.min_ngram
    )
  return session.Session(
    transformer.model(target.config),
    drafter,
    RULES[FLAGS.acceptance](),
    Params(target.params, draft.params if draft else None),
    key=jax.random.key(FLAGS.seed),
    batch=min(FLAGS.batch, len(encoded)),
    prompt_size=session.prompt_size(encoded),
    max_new_tokens=FLAGS.max_new_tokens,
    eos_ids=target.eos_ids,
    temperature=FLAGS.temperature,
    top_k=FLAGS.top_k,
    top_p=FLAGS.top_p,
  )


def generate() -> None:
  """The whole run: check, load, decode both ways, report."""
  apply_config()
  fill_in_flags()
  check_flags()
  if FLAGS.compilation_cache:
    folder = pathlib.Path(FLAGS.compilation_cache).expanduser()
    jax.config.update("jax_compilation_cache_dir", str(folder))
  target, draft = load_models()
  encoded = encode_prompts(target)
  run = make_session(target, draft, encoded)
  check_memory(
    [model.config for model in (target, draft) if model], run.max_length
  )
  painter = display.Painter(FLAGS.color, sys.stdout)
  print("compiling (kept for the next run) ...", file=sys.stderr, flush=True)
  run.warm_up(encoded[: run.batch])
  print(painter.legend() + "\n")

  answers, stats, seconds, differences = [], [], {False: 0.0, True: 0.0}, []
  counts = {False: 0, True: 0}  # new tokens
  quiet = len(encoded) == 1 or not sys.stderr.isatty()
  for first in tqdm(
    range(0, len(encoded), run.batch), unit="batch", disable=quiet
  ):
    rows = encoded[first : first + run.batch]
    decoded = {}
    for plain in (False, True):
      show = painter if not plain and first == 0 else None
      decoded[plain] = run.decode(
        rows, first, plain, target.tokenizer, FLAGS.stop, show
      )
      seconds[plain] += decoded[plain].seconds
      counts[plain] += sum(len(a.ids) for a in decoded[plain].answers)
    stats.append(decoded[False].stats)
    for i, prompt in enumerate(rows):
      ours, plain = (decoded[p].answers[i] for p in (False, True))
      if i or first:
        print(painter.dim(f"\n--- prompt {first + i}"))
        ours.show(painter)
      same = ours.ids == plain.ids
      if not same and comparable():
        differences.append(
          run.first_difference(prompt, ours.ids, plain.ids, first + i)
        )
    answers += decoded[False].answers
  print("\n")
  summary = report.report(
    stats,
    (counts[False], counts[True]),
    (seconds[False], seconds[True]),
    differences if comparable() else None,
    run.compile_seconds,
  )
  print(display.table(summary.rows()))
  if FLAGS.json:
    write_json(summary, encoded, answers)
  if FLAGS.html:
    write_page(summary, encoded, answers, target.tokenizer)


def comparable() -> bool:
  """Whether this run's text should equal plain decoding's, token for token."""
  return FLAGS.temperature == 0 or FLAGS.acceptance == "coupled"


def write_json(summary, encoded, answers) -> None:
  """Writes --json."""
  document = {
    "prompts": [
      {"prompt_token_ids": ids, "token_ids": answer.ids, "text": answer.text}
      for ids, answer in zip(encoded, answers)
    ],
    **summary.document(),
  }
  pathlib.Path(FLAGS.json).write_text(json.dumps(document, indent=1) + "\n")


def write_page(summary, encoded, answers, tokenizer) -> None:
  """Writes --html."""
  drafter = f"lookup, {FLAGS.min_ngram} to {FLAGS.ngram} tokens"
  settings = [
    ("target", FLAGS.target),
    ("drafter", FLAGS.draft or drafter),
    ("rule", FLAGS.acceptance),
  ]
  for name in ("k", "temperature", "top_k", "top_p", "seed"):
    if (value := getattr(FLAGS, name)) is not None:
      settings.append((name, f"{value:.12g}"))
  text = page.render(
    settings,
    summary.headline(),
    [page.section(*pair, tokenizer) for pair in zip(encoded, answers)],
    summary.rows(),
  )
  pathlib.Path(FLAGS.html).write_text(text, encoding="utf-8")
  print(f"page: {FLAGS.html}", file=sys.stderr)


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}")
  try:
    generate()
  except (ValueError, FileNotFoundError, MemoryError) as error:
    sys.exit(f"generate: {error}")


if __name__ == "__main__":
  # Which backends are absent is no news to whoever runs this.
  logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
  app.run(main)
