"""Completes prompts by speculative decoding and shows where each token is from.

  python scripts/generate.py               # models in the package: a first look
  python scripts/generate.py --draft=stdlib-0.3m --k=3 --temperature=0.8
  python scripts/generate.py --target=DIR --draft=DIR --acceptance=rejection
  python scripts/generate.py --target=smollm2-135m-instruct --chat \\
    --prompt='Why is it dark at night?'   # 98 MB once; drafts by prompt lookup
  python scripts/generate.py --prompt_file=prompts.jsonl --batch=4 --json=o.json
  python scripts/generate.py --html=page.html     # each token's story, to keep

Text is printed as it comes, tokens coloured by origin. Then the same prompts
are decoded autoregressively and speculatively in turns, without printing, and a
table sets the two side by side: --repeats=3 pairs are timed at least, each
batch being one, and their spread gives the speedup's standard error.
"""

import sys

import _auto
import _decoding
import _flags
import _main
import _repeats
from absl import flags
from tqdm import tqdm

from specdec.benchmark import prompts, results, runs
from specdec.benchmark.decoder import batches_of, prompt_size
from specdec.checkpoints import shipped
from specdec.report import page
from specdec.report.answer import decode_answers
from specdec.utils import files, terminal

_BEFORE = set(flags.FLAGS)
flags.DEFINE_string("prompt", None, "One prompt.")
flags.DEFINE_multi_string("stop", [], "Text that ends an answer; repeatable.")
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
FLAGS = flags.FLAGS
for _module in (_flags, _auto, _repeats):  # or --help would leave them out
  flags.adopt_module_key_flags(_module)
_OWN = sorted({*FLAGS} - _BEFORE | {*_auto.OWN, "repeats"})
FLAG_NAMES = [*_flags.SHARED, *_OWN]


def check_flags() -> None:
  """Refuses what cannot work, before anything long begins."""
  _repeats.settle(3)
  if FLAGS.prompt is not None and FLAGS.prompt_file:
    raise ValueError("give --prompt or --prompt_file, not both")
  if "" in FLAGS.stop:
    raise ValueError("--stop='' would end every answer; give some text")
  if FLAGS.html:
    _main.check_writable("--html", FLAGS.html)
  if not FLAGS.k:
    _auto.check_flags()


def encode_prompts(target) -> list[list[int]]:
  """Token ids of what was asked, or of a first example."""
  if FLAGS.prompt_file:
    wanted = [p for file in FLAGS.prompt_file for p in prompts.read(file)]
  elif FLAGS.prompt is not None:
    wanted = [prompts.Prompt(text=FLAGS.prompt)]
  elif target.tokenizer is None:
    wanted = [prompts.Prompt(token_ids=tuple(range(16)))]
    terminal.report(
      "no --prompt and no tokenizer: tokens 0 to 15", file=sys.stderr
    )
  else:
    text = shipped.PROMPT.read_text()
    wanted = [prompts.Prompt(text=text)]
    terminal.report(f"no --prompt: completing\n\n{text}", file=sys.stderr)
  return prompts.encode(
    wanted, target.tokenizer, FLAGS.chat, target.config.vocab_size
  )


def generate() -> None:
  """The whole run: check, load, decode both ways, report."""
  _flags.settle(_OWN, auto=True)
  batch = _flags.single("batch")
  check_flags()
  header = _decoding.header(_OWN)
  models = _decoding.load(FLAGS.max_new_tokens + prompt_size([[0]]))
  target = models.target
  encoded = encode_prompts(target)
  size = prompt_size(encoded)
  batch, chosen = min(batch, len(encoded)), None
  if models.places:  # a batch that divides; what is too many stands empty
    groups = models.places.target.ways("rows")
    batch = -(-batch // groups) * groups
  if not FLAGS.k:
    chosen = _auto.choose(models, encoded[:batch], batch)
    FLAGS.k = (chosen.k,)
    terminal.report(_auto.explain(chosen, batch))
  k = _flags.single("k")
  decoder = _decoding.make_decoder(models, k, batch, size, target.eos_ids)
  decoders = {"speculative": decoder, runs.BASELINE: decoder.baseline()}
  _decoding.check_memory(
    models.configs,
    decoder.max_length,
    places=models.places,
    show=size > prompt_size([[0]]),  # more than was planned for
  )
  painter = terminal.Painter(FLAGS.color, sys.stdout)
  batches = batches_of(encoded, batch)
  with terminal.progress("compiling (kept for the next run)"):
    compile_seconds = sum(
      one.warm_up(batches[0].rows) for one in decoders.values()
    )
  print(painter.legend())
  for caveat in _decoding.caveats():
    terminal.report(f"warning: {caveat}")
  print()

  quiet = len(encoded) == 1 or not sys.stderr.isatty()
  answers, faults = [], []
  for some in tqdm(batches, unit="batch", disable=quiet):
    completed, part = decode_answers(
      *(decoder, some, target.tokenizer, FLAGS.stop),
      None if answers else painter,
    )
    faults += completed.faults
    for answer in part:
      if answers:
        print(painter.dim(f"\n--- prompt {len(answers)}"))
        answer.show(painter)
      answers.append(answer)
  if faults and not any(answer.ids for answer in answers):
    raise ValueError(faults[0])

  def way(decoder):
    """Decodes by one program, or in pieces to look for stop strings."""
    if not FLAGS.stop:
      return lambda batch: decoder.complete(batch, strict=False)
    return lambda batch: decode_answers(
      decoder, batch, target.tokenizer, FLAGS.stop
    )[0]

  repeats = _repeats.turns(len(batches))
  timed = runs.interleave(
    {name: way(one) for name, one in decoders.items()}, batches, repeats
  )
  total = len(batches) * repeats
  timed = [*tqdm(timed, "timing", total, unit="pair", disable=quiet)]
  comparison = runs.Comparison(decoders, batches, timed)
  summary = comparison.run("speculative", k, _decoding.comparable())
  terminal.report("\n")
  table = [*summary.rows()]
  if chosen:
    table.append(("speedup expected", f"{chosen.speedup:.2f} x, k = {k}"))
  table += [("compiled in", f"{compile_seconds:.1f} s")]
  caveats = [*header["caveats"], *faults]
  table += [("warning", caveat) for caveat in caveats]
  terminal.report(terminal.table(table))
  if FLAGS.json:
    document = header | {
      "caveats": caveats,
      "runs": [summary.document()],
      "compile_seconds": compile_seconds,
      "prompts": [
        {"prompt_token_ids": ids, "token_ids": answer.ids, "text": answer.text}
        for ids, answer in zip(encoded, answers)
      ],
    }
    results.write_json(FLAGS.json, document)
  if FLAGS.html:
    write_page(summary, table, encoded, answers, target.tokenizer)


def write_page(summary, table, encoded, answers, tokenizer) -> None:
  """Writes --html."""
  settings = [
    ("target", FLAGS.target),
    ("drafter", _decoding.describe_drafter()),
    ("rule", FLAGS.acceptance),
    ("k", str(summary.k)),
  ]
  for name in ("temperature", "top_k", "top_p", "seed"):
    if (value := getattr(FLAGS, name)) is not None:
      settings.append((name, f"{value:.12g}"))
  text = page.render(
    settings,
    summary.headline(),
    [page.section(*pair, tokenizer) for pair in zip(encoded, answers)],
    table,
  )
  files.replace_text(FLAGS.html, text)
  terminal.report(f"page: {FLAGS.html}", file=sys.stderr)


main = _main.main_of("generate", generate)

if __name__ == "__main__":
  _main.start(main)
