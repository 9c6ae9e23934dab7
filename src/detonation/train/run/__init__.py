"""One run: its checks, its processes, and the work of each rank up to the summary."""
