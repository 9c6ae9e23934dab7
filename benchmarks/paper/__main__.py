"""`python -m benchmarks.paper`: see experiment.py."""

from benchmarks.paper.experiment import main

if __name__ == "__main__":
    main()
