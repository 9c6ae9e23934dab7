"""`python -m benchmarks.long_rounds`: see experiment.py."""

import sys

from benchmarks.long_rounds.experiment import main

if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # the run goes on from its last state
        sys.exit(130)
