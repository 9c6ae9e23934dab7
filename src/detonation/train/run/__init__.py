"""One run: its checks, its processes, and the work of each rank from the start to the summary."""
