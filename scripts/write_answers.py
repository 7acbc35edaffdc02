"""Lets a target answer prompts: text of its own for a drafter to learn from.

  python scripts/write_answers.py --target=smollm2-135m-instruct --chat \\
    --prompt_file=prompts.jsonl --batch=16 --max_new_tokens=128 \\
    --output=runs/answers
  python scripts/train_drafter.py --config=... --folder=runs/drafter \\
    --config.data=runs/answers/answers.jsonl

A draft is used behind what its target wrote, so that is what it learns best
from (DistillSpec, arXiv:2310.08461). Autoregressive decoding, at --temperature;
an end token ends an answer. The output folder gets answers.jsonl: token_ids of
prompt and answer, how many of them are the prompt's, and the prompt's number.
The same command goes on where it was killed. Prompts that a drafter is to be
measured on must not be among them.
"""

import random
import sys
from pathlib import Path

import _decoding
import _flags
import _main
import _prompt_files
from absl import flags
from tqdm import tqdm

from specdec import decode
from specdec.benchmark import evaluation
from specdec.benchmark.decoder import Batch, prompt_size
from specdec.utils import files, terminal

FLAGS = flags.FLAGS
for _module in (_flags, _prompt_files):  # or --help would leave them out
  flags.adopt_module_key_flags(_module)
_OWN = _prompt_files.OWN
FLAG_NAMES = [*_flags.SHARED, *_OWN]


def answer(models, encoded, lines) -> None:
  """Answers whatever `lines` does not hold yet."""
  batch = _flags.single("batch")
  done = {line["prompt"] for line in lines.entries}
  left = [i for i in range(len(encoded)) if i not in done]
  left.sort(key=lambda i: len(encoded[i]))  # batches of like lengths
  batches = [
    left[first : first + batch] for first in range(0, len(left), batch)
  ]
  # What a run that is stopped has answered is of all lengths.
  random.Random(FLAGS.seed).shuffle(batches)
  decoders = {}
  with tqdm(total=len(encoded), initial=len(done), unit="answer") as progress:
    for members in batches:
      size = prompt_size([encoded[i] for i in members])
      if size not in decoders:
        decoders[size] = _decoding.decoder_of(
          models,
          decode.NO_DRAFTER,
          decode.NO_DRAFT_RULE,
          batch,
          size,
          models.target.eos_ids,
        )
        with terminal.progress(f"compiling prompts of at most {size} tokens"):
          decoders[size].compile()
      rows = [encoded[i] for i in members]
      found = decoders[size].complete(Batch(rows, members))
      for i, prompt, text in zip(members, rows, found.texts):
        lines.append(
          {
            "prompt": i,
            "prompt_tokens": len(prompt),
            "token_ids": [*prompt, *text],
          }
        )
      progress.update(len(members))


def work() -> None:
  """The whole run: check, load, answer."""
  for name in ("draft", "learned", "shape", "acceptance", "mesh"):
    if FLAGS[name].present:
      raise ValueError(f"--{name} is not for write_answers: nobody drafts")
  _flags.settle(_OWN)
  _prompt_files.check_flags()
  header = _decoding.header(_OWN)
  longest = evaluation.buffer_size() + FLAGS.max_new_tokens
  models = _decoding.load_baseline(longest)
  encoded, wanted, _ = _prompt_files.read_prompts(models.target)
  groups = [_prompt_files.group_of(prompt) for prompt in wanted]
  chosen, _ = _prompt_files.choose(encoded, groups)
  encoded = [encoded[i] for i in chosen]
  folder = Path(FLAGS.output)
  _prompt_files.claim(folder, header, models, encoded)
  lines = files.Lines(folder / "answers.jsonl")
  for line in lines.broken:
    terminal.report(f"skipped: {line}; it is answered again", file=sys.stderr)
  answer(models, encoded, lines)
  tokens = sum(
    len(line["token_ids"]) - line["prompt_tokens"] for line in lines.entries
  )
  terminal.report(
    f"{len(lines.entries)} answers of {tokens:,} tokens: {folder}"
  )


main = _main.main_of(
  "write_answers", work, interrupted="stopped; the same command goes on"
)

if __name__ == "__main__":
  _main.start(main)
