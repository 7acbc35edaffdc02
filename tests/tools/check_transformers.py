"""Compares greedy text of scripts/generate.py with that of transformers.

  python scripts/generate.py --prompt_file=P.jsonl --json=out.json
  python tests/tools/check_transformers.py --target=MODEL --json=out.json

Needs torch and transformers, not JAX. MODEL is a Hugging Face directory or a
.gguf file, for which transformers wants the packages gguf and accelerate. Exit
code 1 if any prompt differs.
"""

import json
import pathlib
import sys

import torch
import transformers
from absl import app, flags

_TARGET = flags.DEFINE_string("target", None, "Model.", required=True)
_JSON = flags.DEFINE_string(
  "json", None, "Written by generate.py at temperature 0.", required=True
)


def main(argv):
  del argv
  folder, options = pathlib.Path(_TARGET.value), {}
  if folder.suffix == ".gguf":
    folder, options = folder.parent, {"gguf_file": folder.name}
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager", **options
  ).eval()
  entries = json.loads(pathlib.Path(_JSON.value).read_text())["prompts"]
  same = 0
  for number, entry in enumerate(entries):
    prompt = torch.tensor([entry["prompt_token_ids"]])
    ours = entry["token_ids"]
    with torch.no_grad():
      theirs = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=len(ours),
      )[0, prompt.shape[1] :].tolist()
    equal = theirs == ours
    same += equal
    print(
      f"prompt {number}: {'same' if equal else 'differs'}, {len(ours)} tokens"
    )
  print(f"{same} of {len(entries)} the same")
  sys.exit(same < len(entries))


if __name__ == "__main__":
  app.run(main)
