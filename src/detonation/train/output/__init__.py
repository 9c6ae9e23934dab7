"""The output of a run: its directory, `metrics.jsonl`, trackers, and lines on the terminal."""
