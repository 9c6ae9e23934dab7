"""The faults of an update log, where the number of shards of a run has changed."""

import pytest

from detonation.log.continuity import log_faults, log_files
from detonation.log.records import START, STEP, noted


def written(folder, shard, first, last, shards):
    """Writes the file of one shard, with the steps from `first` to `last`, in a world of `shards` shards."""
    records = [noted(START, first, {"shards": shards})]
    records += [noted(STEP, step, {}) for step in range(first + 1, last + 1)]
    content = b"".join(bytes(part) for record in records for part in record.parts())
    (folder / f"replica0-shard{shard}-{first}.updates").write_bytes(content)


def faults(folder, shards, saved):
    return log_faults(folder, log_files(folder), shards, measured=12, saved=saved)


@pytest.fixture
def fewer(tmp_path):
    """Two shards wrote up to step 4. One shard went on from the checkpoint of step 3."""
    for shard in (0, 1):
        written(tmp_path, shard, 0, 3, shards=2)
    written(tmp_path, 1, 3, 4, shards=2)
    for first in (3, 6, 9):
        written(tmp_path, 0, first, first + 3, shards=1)
    return tmp_path


def test_the_log_of_a_shard_ends_where_a_world_of_fewer_shards_begins(fewer):
    assert faults(fewer, shards=1, saved=12) == []


def test_the_last_file_of_a_shard_that_is_gone_may_stay(fewer):
    """A run removes files before its oldest checkpoint, but each rank keeps its last one."""
    for name in ("shard0-0", "shard1-0", "shard0-3"):
        (fewer / f"replica0-{name}.updates").unlink()
        assert "shard1" not in str(faults(fewer, shards=1, saved=12))


def test_a_shard_that_comes_back_goes_on_where_it_comes_back(fewer):
    for shard in (0, 1):
        written(fewer, shard, 9, 12, shards=2)
    assert faults(fewer, shards=2, saved=12) == []
    written(fewer, 1, 9, 9, shards=2)
    (fault,) = faults(fewer, shards=2, saved=12)
    assert "replica0-shard1" in fault and "ends after step 9, and 12 steps were measured" in fault


def test_a_shortened_log_of_a_shard_that_is_gone_is_a_fault(fewer):
    (fewer / "replica0-shard1-3.updates").unlink()
    written(fewer, 1, 0, 1, shards=2)
    (fault,) = faults(fewer, shards=1, saved=12)
    assert "replica0-shard1" in fault and "lacks the steps 2 to 3: replica0-shard1-0" in fault


def test_a_shortened_log_is_a_fault_of_its_own_shard_alone(fewer):
    written(fewer, 0, 6, 7, shards=1)
    (fault,) = faults(fewer, shards=1, saved=12)
    assert "replica0-shard0 in" in fault and "lacks the steps 8 to 9: replica0-shard0-6" in fault
