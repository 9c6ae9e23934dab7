"""Output of a run: its directory, `metrics.jsonl`, trackers, and the terminal."""
