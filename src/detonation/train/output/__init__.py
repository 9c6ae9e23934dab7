"""The output of a run: its directory, `metrics.jsonl`, trackers, the lines and gauges of the
terminal."""
