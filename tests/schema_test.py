"""docs/schema.json describes what generate, bench and eval write, no less.

Documents are from real runs on a tiny model.
"""

import contextlib
import io
import json
import pathlib

import jsonschema
import pytest

import programs

PATH = pathlib.Path(__file__).parents[1] / "docs" / "schema.json"
SCHEMA = json.loads(PATH.read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
OPEN = "settings", "versions", "flops"  # their members go by many names
LINES = [
  {"prompt": "hello hello hello", "category": "greetings"},
  {"prompt": "ababab"},
]


def write_documents(folder):
  """A document of each kind, by name."""
  target = programs.write_model(folder, num_layers=1)
  two_layers = folder / "two"
  programs.write_model(two_layers, num_layers=2)
  lines, out = folder / "lines.jsonl", folder / "out.json"
  lines.write_text("".join(json.dumps(line) + "\n" for line in LINES))
  prompts = f"--prompt_file={lines}"
  documents = {}

  def run(program, *arguments, target=target, output=None):
    arguments = [f"--target={target}", "--max_new_tokens=6", *arguments]
    if output:
      arguments.append(f"--output={folder / output}")
    path = folder / output / "results.json" if output else out
    if not output:
      arguments.append(f"--json={out}")
    programs.run(program, *arguments)
    return json.loads(path.read_text())

  documents["greedy"] = run(
    "generate", "--k=2", prompts, "--drafter=lookup(min_ngram=0)"
  )
  sampled = "--temperature=1", "--acceptance=rejection"
  documents["sampled"] = run("generate", "--k=2", "--prompt=ab", *sampled)
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as at:
    programs.fake_machine(at)
    documents["bench"] = run(
      *("bench", "--k=2", "--context=8", "--repeats=2", "--passes=2"),
      "--limit=2",
    )
  last = printed.getvalue().splitlines()[-1]
  assert json.loads(last) == documents["bench"]
  with lines.open("a") as file:
    file.write('{"prompt":\n')
  json_too = f"--json={out}"
  documents["eval"] = run("eval", "--k=2", prompts, json_too, output="eval")
  assert json.loads(out.read_text()) == documents["eval"]
  few = prompts, "--limit=1"
  drafter = f"--drafter=model({target})"
  documents["rules"] = run(
    *("compare_rules", "--only=block", "--sizes=1", drafter, *few),
    output="rules",
  )
  documents["drafters"] = run(
    *("compare_drafters", "--k=1", "--tree_size=0", *few),
    "--drafters=early_exit(1)",
    target=two_layers,
    output="drafters",
  )
  return documents


def objects(schema):
  """Every schema of an object in a schema."""
  if isinstance(schema, list):
    schema = dict(enumerate(schema))
  if isinstance(schema, dict):
    if "properties" in schema:
      yield schema
    for value in schema.values():
      yield from objects(value)


def members(document):
  """Every (object, name of a member), without what is in the open ones."""
  if isinstance(document, list):
    document = dict(enumerate(document))
  elif isinstance(document, dict):
    yield from ((document, name) for name in document)
  else:
    return
  for name, value in document.items():
    if name not in OPEN:
      yield from members(value)


def assert_refuses_faults(document):
  """No member may be missing, added or of another type."""
  for place, name in list(members(document)):
    kept = dict(place)
    place["unheard_of"] = 1
    assert not VALIDATOR.is_valid(document)
    del place["unheard_of"]
    place[name] = 1 if isinstance(place[name], str) else "1"
    assert not VALIDATOR.is_valid(document), name
    del place[name]
    assert not VALIDATOR.is_valid(document), name
    place |= kept


def test_is_a_schema_that_describes_every_property_and_allows_no_other():
  VALIDATOR.check_schema(SCHEMA)
  for schema in objects(SCHEMA):
    assert schema["additionalProperties"] is False
    for name, value in schema["properties"].items():
      assert value.get("description", "").endswith("."), name


# One test, so that the documents are written by one of pytest's processes.
def test_real_documents_are_of_this_form_and_show_all_of_it(tmp_path):
  documents = write_documents(tmp_path)
  for document in documents.values():
    VALIDATOR.validate(document)
  shown = {name for _, name in members(list(documents.values()))}
  assert shown == {n for s in objects(SCHEMA) for n in s["properties"]}
  runs = {kind: document["runs"] for kind, document in documents.items()}
  assert runs["greedy"][0]["identity"]["share"] == 1
  assert runs["sampled"][0]["identity"] is None
  assert runs["sampled"][0]["acceptance"]["alpha"]["value"] is None
  groups = [run["group"] for run in runs["eval"]]
  assert groups == ["greetings", "lines", "all"]
  assert len(documents["eval"]["broken_lines"]) == 1
  for document in documents.values():
    assert_refuses_faults(document)
