"""Packages in a corpus: their licences, their tables, what is held out."""

import hashlib
import json
import re
import sys

import pytest

from specdec.training import corpus, prompts
from specdec.utils import run_folder


@pytest.fixture
def install(tmp_path, monkeypatch):
  """Installs packages of one file each, with lines of metadata."""
  site = tmp_path / "site"
  monkeypatch.syspath_prepend(str(site))

  def install(name, *metadata, files=None):
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    head = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
    (info / "METADATA").write_text("\n".join([*head, *metadata, ""]))
    files = files or {f"{name}/one.py": f"name = {name!r}\n"}
    for path, text in files.items():
      (site / path).parent.mkdir(parents=True, exist_ok=True)
      (site / path).write_text(text)
    lines = "".join(f"{path},,\n" for path in files)
    (info / "RECORD").write_text(f"{lines}{info.name}/METADATA,,\n")

  return install


@pytest.mark.parametrize(
  "lines, licence",
  [
    (["License-Expression: BSD-3-Clause"], "BSD-3-Clause"),
    *(
      ([f"License-Expression: {x}"], x)
      for x in (
        "mit",
        "BSD-3-Clause AND (0BSD OR Zlib)",
        "Apache-2.0 WITH LLVM-exception",
      )
    ),
    (
      [
        "License: Copyright of somebody",
        "        a library under the GNU GPL comes along",
        "Classifier: License :: OSI Approved :: BSD License",
      ],
      "BSD License",
    ),
    (
      ["Classifier: License :: OSI Approved :: Apache Software License"],
      "Apache Software License",
    ),
    (["License: MIT License", "        Copyright of somebody"], "MIT License"),
    (
      [
        "Classifier: License :: OSI Approved",
        "Classifier: License :: OSI Approved :: BSD License",
      ],
      "BSD License",
    ),
  ],
)
def test_licences_that_let_their_text_be_used(install, lines, licence):
  install("package", *lines)
  assert corpus.licence_of("package") == licence


@pytest.mark.parametrize(
  "lines, message",
  [
    ([], "says nothing of its licence"),
    (["License-Expression: LGPL-3.0-or-later"], "says LGPL-3.0-or-later of"),
    (["License-Expression: MIT AND MPL-2.0"], "says MIT AND MPL-2.0 of its"),
    (
      [
        "License: MIT",
        "Classifier: License :: OSI Approved :: GNU General Public License",
      ],
      "says GNU General Public License of its licence",
    ),
    (["License: Proprietary"], "says Proprietary of its licence"),
    (["License: DISCLAIMER"], "says DISCLAIMER of its licence"),
    *(
      ([f"License-Expression: {x}"], "of its licence; accepted")
      for x in (
        "MIT AND gpl-3.0-only",
        "(MIT OR Apache-2.0) AND CC-BY-NC-4.0",
        "MIT AND LicenseRef-Proprietary",
        "GPL-3.0-only WITH Classpath-exception-2.0",
        "MITRE-Proprietary",
      )
    ),
    *(
      ([f"License: {x}"], "of its licence; accepted")
      for x in (
        "gpl-3.0 and BSD",
        "GPL with BSD parts",
        "ISC-Custom-NonCommercial",
        "Not BSD: all rights reserved",
        "MIT for academic use only",
        "Apache License 2.0 with Commons Clause",
        "BSD License\n        Parts are under the GNU GPL",
      )
    ),
    (
      ["License: MIT", "Classifier: License :: Other/Proprietary License"],
      "says Other/Proprietary License of its licence",
    ),
    (
      ["License: GPLv3", "Classifier: License :: OSI Approved :: MIT License"],
      "says MIT License, GPLv3 of its licence",
    ),
  ],
)
def test_other_licences(install, lines, message):
  install("package", *lines)
  with pytest.raises(ValueError, match=re.escape(message)):
    corpus.licence_of("package")


def test_packages_of_a_corpus(install, tmp_path):
  table = "x = [" + "1, " * 200 + "]\n"
  install(
    "taught",
    "License: MIT",
    files={
      "taught/one.py": "taught = 1\n",
      "taught/table.py": table,
      "taught/tests/test_one.py": "assert taught\n",
      "taught/_vendor/other.py": "other = 1\n",
      "taught/copy.py": "name = 'kept'\n",
      "ast.py": "other = 1\n",
      "../bin/tool.py": "tool = 1\n",
    },
  )
  install("kept", "License: MIT")  # a copy of whose file was taught's
  folder = tmp_path / "corpus"
  corpus.write(folder, ["taught"], ["kept"])
  run_folder.release()
  assert (folder / "train/taught/one.py").read_text() == "taught = 1\n"
  names = {x.name for x in (folder / "train/taught").iterdir()}
  assert names == {"one.py", "ast.py"}
  assert (folder / "train/taught/ast.py").read_text() == "other = 1\n"
  assert "class NodeVisitor" in (folder / "train/ast.py").read_text()
  assert (folder / "held_out/kept/one.py").read_text() == "name = 'kept'\n"
  assert (folder / "held_out/json/decoder.py").is_file()
  manifest = json.loads((folder / "manifest.json").read_text())
  digest = hashlib.sha256(b"taught = 1\n").hexdigest()
  assert manifest["train"]["taught/one.py"] == digest
  library, kept, taught = manifest["sources"]
  version = ".".join(map(str, sys.version_info[:3]))
  assert (library["name"], library["version"]) == ("CPython", version)
  assert (taught["name"], taught["version"]) == ("taught", "1.0")
  assert (taught["licence"], kept["held_out"]) == ("MIT", ["kept"])


def test_what_is_not_there_is_refused_before_anything_is_written(tmp_path):
  with pytest.raises(ValueError, match="package not-there is not installed"):
    corpus.write(tmp_path / "corpus", ["not-there"])
  assert not (tmp_path / "corpus").exists()


def test_beginnings_are_from_all_over_a_text(tmp_path):
  lines = [f"line {i:04d} of the text\n" for i in range(400)]
  (tmp_path / "text.py").write_text("".join(lines))
  heads = prompts.beginnings(tmp_path)
  assert len(heads) == len("".join(lines)) // 1200 + 1
  for head in heads:
    assert head.startswith("line ") and 100 < len(head) <= 160
    assert head in "".join(lines)
