"""`python -m benchmarks.finetune`: see experiment.py."""

import sys

from benchmarks.finetune.experiment import main

if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # a run that has not ended begins anew
        sys.exit(130)
