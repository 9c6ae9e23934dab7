"""Two jobs on one run directory: the second is refused; the lock of one that is dead is nobody's."""

import os
import select
import signal

from commands import Command, outliving, write_recipe


def test_of_two_jobs_that_start_at_once_one_is_refused_and_a_dead_one_holds_nothing(tmp_path):
    recipe, out = write_recipe(tmp_path / "tiny.toml"), tmp_path / "run"
    train = ("train", recipe, "--out", out, "--checkpoint-every", 1, "--set", "train.steps=100000")
    jobs = [Command(tmp_path / name, *train) for name in "ab"]
    third = None
    try:
        while not any(job.ended for job in jobs):
            select.select([], [], [], 0.01)
        refused, first = sorted(jobs, key=lambda job: not job.ended)
        assert refused.wait() == 2
        assert refused.errors.startswith(f"error: run directory {out} is in use by ")
        assert refused.errors.endswith(": wait for it, or choose another --out\n")
        first.wait_for_step(3)
        ranks = first.ranks
        os.kill(first.pid, signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL and outliving(ranks) == []
        third = Command(tmp_path / "c", *train, "--resume", "--stop-after", 1)
        assert third.wait() == 0, third.errors
    finally:
        for job in (*jobs, *([third] if third else [])):
            job.kill()
