"""`python -m benchmarks.second_round`: see experiment.py."""

from benchmarks.second_round.experiment import main

if __name__ == "__main__":
    main()
