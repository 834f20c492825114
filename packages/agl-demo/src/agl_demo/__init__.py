"""What ``agl demo`` runs: a small text-to-SQL agent that learns on a laptop."""

from pathlib import Path

TINY_MODEL = str(Path(__file__).parent / "tiny_model")
"""A language model of half a million weights, made by `agl_demo.pretrain`; good for trying things out in seconds."""
