"""How small and how fast: Weightwire's codecs beside six published encodings."""

from __future__ import annotations

from weightwire.bench.chain import make_chain, read_chain
from weightwire.bench.generate import generate_pair
from weightwire.bench.plot import save_plot
from weightwire.bench.report import to_json, to_markdown
from weightwire.bench.results import BenchReport
from weightwire.bench.run import run_codec_bench

__all__ = [
    "BenchReport",
    "generate_pair",
    "make_chain",
    "read_chain",
    "run_codec_bench",
    "save_plot",
    "to_json",
    "to_markdown",
]
