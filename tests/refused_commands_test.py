"""Commands that cannot work end in one sentence, and write nothing."""

import re
import shlex

import jax
import pytest

import programs
from specdec.benchmark.setup import Setup
from specdec.compiled import steps

PROMPTS = "--target={model} --prompt_file={prompts} --max_new_tokens=8"
LENGTHS = "--drafter=early_exit(1) --prompt=ab --max_new_tokens=24"
HEAD = "--config={configs}/drafter.py:eagle3 --config.options.batch=4"
# Programs that these commands end before a target is loaded.
NOT_LOADING = {"goodput", "eval", "sweep"}
# A program and flags of all lines; then more flags, and what the sentence says.
COMMANDS = {
  "sweep --sweep={configs}/../sweeps/shipped.py": """
    --output={prompts}/run :: --output=...jsonl/run: ...jsonl is not a folder
  """,
  "train": """
    --config={configs}/target.py --config.options.stpes=3
      :: --config.options.stpes: did you mean steps
    --config={configs}/target.py --config.options.steps.a=3
      :: --config.options.steps.a: no entry 'a'
    --config={configs}/draft.py:9m :: flag --config=...draft.py:9m: its
      get_config() cannot be used: ValueError: size '9m' is unknown; known: 0.3m
    --fodler=a :: train: Unknown command line flag 'fodler'; did you
  """,
  "eval": """
    --k=adaptive :: flag --k=adaptive: adaptive is for --k of gen
    --output=out :: give --prompt_file, such as /
    --prompt_file=README.md :: give --output, a folder
  """,
  "generate --target={model}": """
    stray arguments :: generate: unexpected argument 'stray';
    --k=-1 :: --k=-1; it must be >= 0
    --k=1-300000000 :: '1-300000000' gives more than 10,000 integers
    --k=99999999999999 :: is no list of integers
    --max_new_tokens=99999999999 :: --max_new_tokens=99999999999; it must be be
    --prompt= :: --prompt is empty
    --prompt=a --prompt=b :: give --prompt once; several go into
    --prompt_file=nowhere.jsonl :: nowhere.jsonl does not exist
    --json=nowhere/o.json :: there is no folder nowhere; make it first
    --html=. :: --html=. is a folder; give a file in it
    --chat --prompt=a :: --chat: ... no chat template; leave --chat out
    --target=stdlib-1n :: stdlib-1n is neither a ...did you mean ...stdlib-1m
    --drafter=head(nowhere) :: no such drafter as 'nowhere'; k
    --config=nowhere.py :: no such file; ...known: ...lookup.py
  """,
  f"generate --target={{model}} {LENGTHS}": """
    --k=auto --most_k=24 :: leave room in --max_new_tokens=24
    --k=auto --shape=chains(2) :: is of chains
    --k=auto --calibration=/nowhere/x.json :: there is no folder
    --k=2 --most_k=3 :: is for --k=auto
    --k=adaptive --shape=chains(2) :: is of chains
    --k=adaptive --explain :: --explain is for --k=auto
    --k=adaptive --most_k=65 --max_new_tokens=99 :: in 1..64
  """,
  "bench --target={model}": """
    --repeats=0 :: --repeats=0; it must be >= 1
    --limit=-1 :: --limit=-1; it must be >= 0
    --drafter=early_exit(3) :: has 2 layers, so it must be in 1..1
    --nodecode --k=2 :: --k has no effect with --nodecode
    --nodecode --length=auto :: --length has no effect with --nodecode
    --k=auto --length=adaptive :: --length is compared with numbers
    --k=2 --length=chain :: --length=chain decides nothing
    --calibrate=c.json --limit=2 :: --limit has no effect with --calib
    --target=preset:llama3-1b :: is a shape alone; add random_weights
    --batch=200 --context=1000 :: give --prompt_file
  """,
  f"goodput {PROMPTS}": """
    --context=9 :: --context is for prompts cut from a text, without
  """,
  "beam_search --target={model} --prompt=a": """
    --limit=2 :: --limit is for --prompt_file
  """,
  f"eval {PROMPTS} --output={{out}}": """
    --limit=-1 :: --limit=-1; it must be >= 0
    --batch=1,2 :: takes one number
    --output={prompts} :: --output=...jsonl is not a folder; name a folder
    --output={prompts}/run :: --output=...jsonl/run: ...jsonl is not a folder
  """,
  f"goodput {PROMPTS} --drafter=lookup(min_ngram=0) --requests=5": """
    --loads=0 :: a load of 0; it must be >= 0.001, or inf
    --loads=much :: --loads=much; give numbers >= 0.001, or inf
    --loads= :: give at least one load
    --requests=0 :: --requests=0; it must be >= 1
    --refill=2 :: --refill=2 is more than --batch=1
    --every=0 :: --every=0
    --most_k=5 :: --most_k is for --length
    --calibration=c.json :: --calibration is for --length
    --length=adaptive :: --most_k=8; it must be >= 1 and leave room in
    --length=auto --most_k=2 --drafter=none :: no k to choose
    --length=auto --most_k=2 --calibration=nowhere/c.json
      :: --calibration=nowhere/c.json
    --least_new_tokens=9 :: 9 to 8 new tokens
  """,
  f"compare_rules {PROMPTS} --output={{out}} --sizes=2 --temperature=1 "
  "--drafter=early_exit(1)": """
    --only=blocks :: did you mean block
    --shapes=ring :: --shapes: known: chain
    --sizes=0 :: must be >= 1
    --sizes=16 :: never fits into
    --only=kseq --shapes='dynamic tree' :: none of --only is right
    --only=greedy :: greedy at temperature = 1 would not sample
    --drafter=lookup :: lookup drafts chains...take a drafter that can
  """,
  f"compare_drafters {PROMPTS} --output={{out}}": """
    --k=0 :: --k
    --drafters=early_exit(9) :: exit_layer = 9
    --drafters=; :: --drafters names none
    --output={prompts}/run :: --output=...jsonl/run: ...jsonl is not a folder
    --drafters='lookup | lookup(k=4)' :: how much it drafts is --k
    --drafters=lookup --acceptance=greedy :: would not sample
    --k=3 :: give its --drafters
  """,
  "compare_engines --target=no/where": """
    --k=3 :: give --prompt_file
    --prompt_file={prompts} --peers=vllm
      :: compare_engines: --peers: 'vllm' is unknown; known: llama.cpp-F32,
    --prompt_file={prompts} --drafters=; :: --drafters names none
    --prompt_file={prompts} --drafters=lokup :: lokup; did you mean lookup
    --prompt_file={prompts} --repeats=0 :: --repeats=0; it must be >= 1
    --prompt_file={prompts} --k=0 :: --k=0; it must be >= 1
  """,
  "choose_layers --target={model} --output={out} --context=8": """
    --trials=0 :: --trials=0; it must be >= 1
    --first=lookup :: give layer_skip
    --first=layer_skip(threshold=0.5) :: which is --exit_threshold
    --for_chip=v5e :: is for --objective=predicted
    --objective=predicted --for_chip=x9 :: x9
    --chat :: prompts of --prompt_file
    --first=layer_skip(mlp=[2]) :: layer 2; this target has 2 layers
  """,
  "compare_training": """
    --show=curves :: give folders of train.py
    --title=a x :: --title is for --picture
    nowhere-* :: nowhere-* names no folder
    --json=a x :: --json has no effect with --show=curves
    --show=losses :: give --model and --held_out
    --show=losses x :: takes --model, and no folders
  """,
  "count_experts --target={model}": """
    --chat :: --chat is for --prompt_file
  """,
  "report": """
    --title=a {prompts} :: --title is for --picture
    --picture=a.png --csv=b :: give --picture or --csv
    --picture=a.png --results=b :: give --picture or --results
  """,
  "compile_tpu --mesh=model:1": """
    --topology=v9:1x1 :: no chip 'v9'
    --mesh=model:8 :: there are 1
    --steps=think :: --steps=think; known: prefill
    --hlo={prompts} :: --hlo=...jsonl is not a folder
    --context=1 :: --context=1; it must be >= 2
    --here --patience_seconds=9 :: --here has no time limit
    --max_new_tokens=9 :: Unknown command line flag 'max_new_tokens'
  """,
  "compile_training": f"""
    --here :: give --config, as configs/train/published.py:eagle3
    {HEAD} :: give --mesh, e.g. --mesh=data:2,model:8
    {HEAD} --mesh=data:1 --hlo=nowhere/x :: there is no folder nowhere
    {HEAD} --mesh=data:2,model:2 :: needs 4 devices; there are 1
    {HEAD} --mesh=data:1 --here --patience_seconds=9 :: --here has no time
    {HEAD} --mesh=data:1 --topology=v9:1x1 :: no chip 'v9'
    {HEAD} --folder=x :: Unknown command line flag 'folder'
    --mesh=data:1 --config={{configs}}/target.py
      :: --config is not that of a draft head
  """,
  "convert": """
    --source=nope :: convert: nope is neither a path nor
    --output={out} :: convert: --output needs --source
    --source=mtp --output={out} --layout=speculators :: give --target
    --source=mtp --output={out} --layout=orbax --target=stdlib-11m
      :: one of specdec, speculators
    --source=mtp --output={out} --layout=eagle --target=stdlib-11m
      :: layout = 'compact'
  """,
  "export": """
    --k=3 :: give --output
    --engine=vllm :: give --k
    --k=3 --output={out} --alpha=0.5 :: --alpha is for --chip
    --k=3 --output={out} --chip=v6e :: --chip needs one of
    --k=3 --output={configs} :: is not empty
    --k=3 --output={out} --engine=all --drafter=early_exit(1)
      :: drafts in no engine here
  """,
  "prepare_data --output={out}": """
    --make=prompts :: give --questions
    --make=prompts --count=0 :: --count=0
    --make=prompts --every=-1 :: --every=-1; it must be >= 0
    --make=prompts --questions=nowhere.jsonl :: nowhere.jsonl
    --make=tokenizer :: give --data
    --make=python --count=1 :: --count has no effect with --make=python
  """,
  "write_text --write=prompts --target={model} --output={out}": """
    --temperature=0 :: again and again
    --temperature=1 :: chat template
    --temperature=1 --count=0 :: --count=0
    --temperature=1 --every=-1 :: --every=-1
    --temperature=1 --chat :: --chat has no effect with --write=prompts
  """,
  "roofline --output={out}": """
    --most=1000000 :: --most=1000000: 1000000 is not integer <= 64
    --ways=1 :: more than the 85.50 that can be used; target weights
    --rank_acceptance=nan :: acceptance must be in [0, 1]
    --numbers=name=3 :: no number 'name'
    --numbers=bandwidth=fast :: --numbers: could not convert
    --batches=0 :: --batches=0; it must be >= 1
    --papers --most=3 :: --most has no effect on the papers'
    --alpha=0.5 --prefix_acceptance=0.5 :: --alpha and --prefix_acc
    --correlation=0.5 :: --correlation is of experts
    --drafter=lookup --drafts=0.1 :: --drafts compares draft models
    --chips=h100,v9 :: no chip 'v9'
  """,
  "roofline --target=llama3-8b --ways=1 --lengths=1": """
    --drafter=lookup :: --lengths prices the steps of a draft model
    --drafter=pard(llama3-1b) :: --lengths prices the steps
    --prefix_acceptance=0.8,0.6 :: --lengths has rows that accept --alpha
    --batches=4096 :: more than the ...that can be used
  """,
}


def lines():
  """Every command, and its sentence."""
  for base, text in COMMANDS.items():
    text = re.sub(r"\n {6}", " ", text)  # a line that goes on
    for line in text.strip().splitlines():
      flags, sentence = line.strip().split(" :: ")
      yield f"{base} {flags}", sentence


@pytest.mark.parametrize("command, sentence", list(lines()))
def test_a_wrong_command_ends_in_one_sentence(
  command, sentence, target, tmp_path, monkeypatch
):
  prompts = tmp_path / "prompts.jsonl"
  prompts.write_text('{"prompt": "abcabc"}\n')
  configs = programs.SCRIPTS.parent / "configs" / "train"
  places = dict(model=target, prompts=prompts, configs=configs)
  places["out"] = tmp_path / "out"
  name, *flags = shlex.split(command.format(**places))
  programs.fake_machine(monkeypatch)
  monkeypatch.setattr(steps, "devices", lambda _: jax.devices()[:1])
  monkeypatch.setattr(steps, "open_no_chip", lambda: None)
  if name in NOT_LOADING:
    monkeypatch.setattr(Setup, "load_target", None)
  with pytest.raises(SystemExit) as ended:
    programs.run(name, *flags)
  message = str(ended.value.code)
  assert message.startswith(f"{name}: ") and "\n" not in message
  expected = ".*".join(map(re.escape, sentence.split("...")))
  assert re.search(expected, message), message
  assert not places["out"].exists()
