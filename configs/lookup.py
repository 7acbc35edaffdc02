"""Prompt lookup on SmolLM2-135M, sampled.

python scripts/generate.py --config=configs/lookup.py --prompt='...'

About 10 s on two cores once compiled. Expect "same text as plain: yes": coupled
acceptance is exact at any temperature.
"""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
  """Flags of scripts/generate.py; those given on the command line win."""
  return config_dict.ConfigDict(
    dict(drafter="lookup", k=5, temperature=0.7, top_p=0.95, chat=True)
  )
