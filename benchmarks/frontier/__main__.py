"""`python -m benchmarks.frontier`: see experiment.py."""

from benchmarks.frontier.experiment import main

if __name__ == "__main__":
    main()
