"""A law of size: what each scheme costs, from 0.04 to 2.3 million parameters. research/size-law.md."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # the older benchmarks import each other by name
