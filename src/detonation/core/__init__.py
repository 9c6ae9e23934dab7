"""What a replication algorithm is: signal, memory, codec, link, round. Needs torch and nothing else."""
