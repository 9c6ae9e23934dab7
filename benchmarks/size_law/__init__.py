"""A law of size: what each scheme costs by size. research/size-law.md has the rules."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # the older benchmarks import each other by name
