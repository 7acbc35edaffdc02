"""What is decoded is what version 0.1.0 decoded, token for token."""

import json

import pytest

import golden
import golden_costs

ENTRIES = json.loads(golden.FILE.read_text())


@pytest.mark.parametrize("way", golden.WAYS)
def test_texts_are_those_of_0_1_0(way):
  expected = {k: v for k, v in ENTRIES.items() if k.split(";")[0] == way}
  assert expected
  assert golden.decoded(way) == expected


def test_every_head_is_decoded():
  assert {key.split(";")[0] for key in ENTRIES} == set(golden.WAYS)


def test_costs_are_as_they_were_written():
  assert golden_costs.numbers() == json.loads(golden_costs.FILE.read_text())
