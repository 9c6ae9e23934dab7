"""One run: its checks, the processes, and each rank's work from joining to the summary."""
