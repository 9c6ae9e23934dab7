"""`make gpu` proves itself on a CPU: each part at a tiny size, in this process."""

import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.gpu import __main__ as check
from benchmarks.gpu import children, common, fast, first, occupancy, right, waiting, world
from benchmarks.gpu.children import environment
from benchmarks.gpu.common import Findings, Job
from benchmarks.gpu.compiling import compile_all

from covering import some
from limits import LIMIT_S

CPU = torch.device("cpu")
SLOW = ("world", "law")
"""Parts that only `make test-all` runs: one starts ranks that import all they need, one trains."""


def job_in(folder, part="part"):
    return Job(CPU, True, Findings(folder / f"{part}.json"), time.monotonic() + LIMIT_S)


@pytest.mark.parametrize(
    "part",
    [
        *(part for part in check.EVERY if part not in ("first", "right", "occupancy", *SLOW)),
        *(pytest.param(part, marks=pytest.mark.long) for part in SLOW),
    ],
)
def test_a_part_measures_and_nothing_in_it_fails(part, tmp_path):
    job = job_in(tmp_path, part)
    import_module(f"benchmarks.gpu.{part}").measure(job)
    found = check.read_findings(tmp_path / f"{part}.json")
    assert not found.failures and found.checks and found.headline
    assert found.table and all(len(row) == len(found.columns) for row in found.table)


def test_fast_measures_what_is_predicted(tmp_path, monkeypatch):
    monkeypatch.setattr(fast, "SCHEMES", {})
    fast.measure(job_in(tmp_path, "fast"))
    found = check.read_findings(tmp_path / "fast.json")
    steps = {row[found.columns.index("step")] for row in found.table}
    ways = ("R=1, all-gather", "R=2, all-gather", "R=8, all-gather", "R=8, owner")
    assert (
        not found.failures and {f"{name}, {way}" for name in fast.PREDICTED for way in ways} < steps
    )
    assert "ms per 1e9" in found.columns and "demo 4/64 sign, R=2, all-gather, bf16" in steps


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # by numpy, in the interpreter
def test_fast_has_a_row_of_each_kernel_that_a_step_launches(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("DETONATION_KERNELS", "triton")
    monkeypatch.setitem(common.SIZES, "tiny", [(64, 64), (3,)])
    job, cold = job_in(tmp_path), []
    monkeypatch.setattr(fast, "cold_cache", lambda device: lambda: cold.append(device))
    made = common.stepper(common.SIZES["tiny"], CPU, fast.PREDICTED["demo 4/64 sign"](), "triton")
    made.step()  # what is built in the first step is no kernel of a step
    fast.kernels(job, "tiny", "demo", made, 1e9)
    rows = {row[1]: dict(zip(job.findings.columns, row, strict=True)) for row in job.findings.table}
    names = ("encode", "seal", "inspect", "decode (signs)")
    assert {*rows} == {f"demo: {name}" for name in names} and len(cold) == 2 * len(names)
    numel = 64 * 64 + 3  # encode reads the gradient, and moves the residual twice
    assert 12 < 1e6 * float(rows["demo: encode"]["floor ms"]) / numel < 14
    assert all(
        row[name] not in ("", "0")
        for row in rows.values()
        for name in ("ms", "GB per s", "times floor")
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # by numpy, in the interpreter
def test_kernels_are_timed_with_other_warps_and_registers(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("DETONATION_KERNELS", "triton")
    monkeypatch.setitem(common.SIZES, "tiny", [(64, 64), (3,)])
    seconds = iter([4.0, *[5.0] * 11, *[2.0] * 12])
    monkeypatch.setattr(occupancy, "median_s", lambda act, *_, **__: act() or next(seconds, 1.0))
    occupancy.measure(job := job_in(tmp_path))
    kernels = {row[0] for row in job.findings.table}
    assert kernels == {"demo 4/64: encode", "demo 4/64: decode (signs)"}
    assert len(job.findings.table) == 24 and not job.findings.failures
    assert job.findings.headline == "no kernel is faster with others"
    seconds = iter([4.0, 3.0])
    assert occupancy.variants(job, "scan", lambda **_: None, 1.0) == [
        "scan with 8 warps, 96 registers takes 0.25"
    ]


@pytest.mark.parametrize(
    ("spans", "covered"),
    [([], 0), ([(0, 3), (1, 2), (2, 4), (6, 7)], 5), ([(0, 1), (1, 2), (5, 5)], 2)],
)
def test_the_device_is_busy_once_where_kernels_run_side_by_side(spans, covered):
    assert waiting.busy_us(spans) == covered


def test_a_repetition_begins_with_what_is_not_timed():
    order = []
    common.median_s(lambda: order.append("step"), CPU, 5, 1, before=lambda: order.append("cold"))
    assert order == ["step", *["cold", "step"] * 5] and common.cold_cache(CPU)() is None


def test_a_world_whose_ranks_end_badly_says_how(tmp_path):
    job, logs = job_in(tmp_path), [tmp_path / "rank0.txt", tmp_path / "rank1.txt"]
    for log in logs:
        log.write_text("ValueError: 3 replicas\n")
    kill = -signal.SIGKILL
    for arguments, codes, good in (
        (["overlap"], [0, 0], True),
        (["overlap"], [0, 1], False),
        (["overlap", "killed"], [1, kill], True),
        (["killed"], [None, kill], False),
        (["killed"], [0, kill], False),
    ):
        before = len(job.findings.failures)
        world.judge(job, arguments, codes, 1.0, logs)
        assert (len(job.findings.failures) == before) is good
    assert (
        job.findings.failures[0]
        == "2 ranks end: they ended with exit code 0, ended with exit code 1"
    )
    assert "3 replicas" in (tmp_path / "part.errors.txt").read_text()


@pytest.mark.long  # no branch of its own
def test_tests_are_counted_and_those_that_fail_are_named(tmp_path):
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import os, pytest\n"
        "def test_random_good(): assert os.environ['TEST_DEVICE'] == 'cpu'\n"
        "def test_random_bad(): raise ValueError('of a sort')\n"
        "def test_random_left_out(): pytest.skip('no second GPU')\n"
    )
    job = job_in(tmp_path)
    right.tested(job, "some", [str(tests)], LIMIT_S, shares=2)
    assert job.findings.table == [["some", "1", "1", "1"]] and job.findings.checks == 2
    assert job.findings.failures == ["test_some.py::test_random_bad: ValueError: of a sort"]
    errors = (tmp_path / "part.errors.txt").read_text()
    assert (
        "def test_random_bad(): raise ValueError('of a sort')" in errors
        and "part.errors.txt" in job.findings.files
    )
    right.tested(job, "missing", [str(tmp_path / "test_gone.py")], LIMIT_S)
    assert job.findings.failures[-1].endswith("see part.missing.txt")
    assert "not found" in (tmp_path / "part.missing.txt").read_text()


@pytest.mark.parametrize("end", ["SIGSEGV", "SIGTERM"])  # the second as at the end of the time
def test_the_end_of_all_tests_costs_no_result_that_was_there(end, tmp_path):
    tests, kill = tmp_path / "test_some.py", f"os.kill(os.getpid(), signal.{end})"
    tests.write_text(
        f"import os, signal\ndef test_random_good(): pass\ndef test_random_last():\n    {kill}\n"
    )
    job = job_in(tmp_path)
    right.tested(job, "some", [str(tests)], LIMIT_S)
    (failure,) = job.findings.failures
    assert job.findings.table == [["some", "1", "0", "0"]] and f"({end})" in failure
    assert failure.endswith(
        "the last test that began: test_some.py::test_random_last; see part.some.txt"
    )
    assert "in test_random_last" in (tmp_path / "part.some.txt").read_text()  # the stack


def test_a_process_that_hangs_is_ended_with_its_children(tmp_path):
    hangs = "import os, signal\nif os.fork(): print('begun', flush=True)\nsignal.pause()"
    code = children.ran(
        [sys.executable, "-c", hangs], environment("cpu"), tmp_path / "log", 0.5, shown=True
    )
    assert (
        code is None
        and children.how_it_ended(code, 0.5) == "was ended after 0 s without an end of its own"
    )


def test_the_whole_traceback_of_an_exception_is_kept(tmp_path):
    def act():
        raise ValueError("at 87:41:\nsource\na reason")

    job = job_in(tmp_path)
    job.attempt("a thing", act)
    assert (
        job.findings.failures == ["a thing: ValueError: at 87:41: ... a reason"]
        and job.findings.began == "a thing"
    )
    assert "Traceback (most recent call last)" in (tmp_path / "part.errors.txt").read_text()


@pytest.mark.long  # tests/kernels/test_compiled.py compiles, and two more processes import torch
def test_kernels_are_compiled_in_several_processes_before_the_clock(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    wanted = ["scan_kernel", "seal_kernel"]
    said = compile_all(
        tmp_path, "--target", "80", "--schemes", "random-sign", "--kernels", *wanted, processes=2
    )
    assert re.fullmatch(r"\d+ kernels by 2 processes in \d+ s", said), (
        said + (tmp_path / "compiling.0.txt").read_text()
    )
    names = {line.split()[1] for line in (tmp_path / "compiling.1.txt").read_text().splitlines()}
    assert names == set(wanted) and list((tmp_path / "cache").rglob("scan_kernel.cubin"))
    about = [
        made.read_text() for name in wanted for made in (tmp_path / "cache").rglob(f"{name}.json")
    ]
    assert about and all('"arch": 80' in each for each in about)


def first_of(kernels, faults, monkeypatch, folder, launch_s=LIMIT_S):
    """The part `first` with some kernels, some of which are made to fail."""
    pytest.importorskip("triton")
    monkeypatch.setattr(first, "LAUNCH_S", launch_s)
    monkeypatch.setenv("GPU_FIRST_FAULT", faults)
    monkeypatch.setattr(first, "TINY", kernels)
    job = job_in(folder, "first")
    first.measure(job)
    return job.findings, (folder / "first.errors.txt").read_text()


@pytest.mark.long  # no branch of its own
def test_a_kernel_that_crashes_or_errs_is_named_with_its_constants(monkeypatch, tmp_path):
    kernels = ("scan_kernel", "seal_kernel", "inspect_kernel")
    found, errors = first_of(kernels, "scan_kernel=crash,seal_kernel=bit", monkeypatch, tmp_path)
    crashed, erred = found.failures
    assert crashed.startswith(
        "scan_kernel: shapes 0: the process ended with exit code -11 (SIGSEGV)"
    )
    assert "launched last: scan_kernel, 1 programs, ROW=1024" in crashed and crashed.endswith(
        "; interpreted: yes"
    )
    assert erred.startswith(
        "seal_kernel: shapes 0: sealed messages: 1 of 328 values differ, the first at 0: 4, not 68"
    )
    assert [row[1] for row in found.table] == ["0 of 1 shapes", "0 of 1 shapes", "1 of 1 shapes"]
    assert "Fatal Python error: Segmentation fault" in errors and "in scan\n" in errors  # the stack


@pytest.mark.long  # no branch of its own
def test_a_kernel_that_hangs_is_ended_and_named_with_its_stack(monkeypatch, tmp_path):
    # a second from the launch on
    found, errors = first_of(
        ("seal_sum_kernel",), "seal_sum_kernel=hang", monkeypatch, tmp_path, launch_s=1.0
    )
    (hung,) = found.failures
    assert hung.startswith(
        "seal_sum_kernel: shapes 0: the process was ended after 1 s without an end of its own"
    )
    assert (
        "launched last: seal_sum_kernel, 1 programs, EACH=3" in hung and "in seal_sum\n" in errors
    )


@pytest.mark.long  # its halves are the crash above and the part that breaks below
def test_a_fault_in_a_kernel_costs_no_other_part(monkeypatch, capsys, tmp_path):
    pytest.importorskip("triton")
    monkeypatch.setenv("GPU_FIRST_FAULT", "scan_kernel=crash")
    monkeypatch.setitem(check.PARTS, "twin", 0)  # which then has no time for a step
    monkeypatch.setattr(check, "GRACE_S", LIMIT_S)
    assert check.main(["twin", "first", "--device", "cpu", "--tiny", "--out", str(tmp_path)]) == 1
    assert (
        check.read_findings(tmp_path / "twin.json").done
        and check.read_findings(tmp_path / "first.json").done
    )
    page = (tmp_path / "report.md").read_text()
    assert (
        "FAILED scan_kernel: shapes 0: the process ended" in page
        and "[first.scan_kernel.txt]" in page
    )
    assert (
        page.index("(`first`)") < page.index("(`twin`)")
        and "FAILED scan_kernel" in capsys.readouterr().out
    )


@pytest.mark.parametrize("kind, failures", [("cuda", ["is interpreted, on the CPU"]), ("cpu", [])])
def test_a_kernel_that_a_gpu_would_interpret_is_no_compiled_one(
    kind, failures, monkeypatch, tmp_path
):
    process = tmp_path / "python"
    process.write_text(
        '#!/bin/sh\necho \'{"interpreted": true}\'\necho \'{"compared": 0, "seen": ""}\'\n'
    )
    process.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(process))
    job = job_in(tmp_path)
    job.device = torch.device(kind)
    found = first.alone(job, "scan_kernel", (0,), tmp_path / "log.txt")
    assert (found.interpreted, found.good) == ("yes", 1) and [
        line for line, _ in found.failures
    ] == failures


@pytest.mark.long_cases("weigh_kernel")
@some("kernel", first.KERNELS, keep=[*first.KERNELS][::3])
def test_every_kernel_is_compared_with_torch_and_a_wrong_bit_is_seen(kernel, monkeypatch):
    pytest.importorskip("triton")
    from benchmarks.gpu import one_kernel

    monkeypatch.setenv("DETONATION_KERNELS", "triton")
    for number in range(len(one_kernel.SHAPES)):
        compared = one_kernel.CASES[kernel](CPU, number)
        assert not one_kernel.difference(compared) and "differ" in one_kernel.difference(
            compared, wrong_bit=True
        )
    assert set(one_kernel.CASES) == set(first.KERNELS)


def test_every_kernel_of_the_package_is_started_first():
    sources = (children.ROOT / "src/detonation/kernels").rglob("*.py")
    assert {
        name
        for file in sources
        for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.M)
    } == set(first.KERNELS)


@pytest.mark.long  # the function by itself is in the test of checksums below
def test_messages_are_sealed_and_inspected_many_times(tmp_path):
    pytest.importorskip("triton")
    job = job_in(tmp_path)
    right.sealed(job)
    assert job.findings.checks == 1 and not job.findings.failures
    assert job.findings.table == [["messages sealed and inspected", "10", "0", "0"]]


@pytest.mark.long_cases("missed-9")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # by numpy, of the random bytes of messages
@pytest.mark.parametrize("kind, at", [("disagree", 0), ("missed", 9), ("unlike_torch", 0)])
def test_a_checksum_that_is_wrong_is_told(kind, at, monkeypatch):
    pytest.importorskip("triton")
    from benchmarks.gpu import seals

    monkeypatch.setenv("DETONATION_KERNELS", "triton")
    inspect, seal = seals.inspection.Inspector.inspect, seals.Header.seal

    def inspected(*arguments):
        table = inspect(*arguments)
        table[0, seals.ADDED] += kind == "disagree"
        table[-1, seals.ADDED] = (
            table[-1, seals.STATED] if kind == "missed" else table[-1, seals.ADDED]
        )
        return table

    def sealed(header, messages, nbytes):
        seal(header, messages, nbytes)
        messages[0, 60] ^= kind == "unlike_torch"

    monkeypatch.setattr(seals.inspection.Inspector, "inspect", inspected)
    monkeypatch.setattr(seals.Header, "seal", sealed)
    found = seals.agreed(CPU, at + 1, LIMIT_S)
    assert found == {"rounds": at + 1, "disagree": -1, "missed": -1, "unlike_torch": -1, kind: at}


def test_no_process_of_a_gpu_interprets_kernels(monkeypatch):
    """They would read addresses of the GPU on the host."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert (
        environment("cuda")["TRITON_INTERPRET"] == "0"
        and environment("cpu")["TRITON_INTERPRET"] == "1"
    )
    assert "TRITON_INTERPRET=0" in documented("TEST_DEVICE=cuda")
    monkeypatch.delenv("TRITON_INTERPRET")
    given = {**environment("cpu"), "TEST_DEVICE": "cuda"}
    said = "import conftest, os; print(os.environ.get('TRITON_INTERPRET'))"
    done = subprocess.run(
        [sys.executable, "-c", said], env=given, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "None"


def documented(words):
    """The line of the page with these words."""
    lines = (Path(__file__).parents[2] / "docs/gpu.md").read_text().splitlines()
    return next(line for line in lines if words in line)


def test_without_a_gpu_it_says_so_in_one_line_and_does_not_end_well(capsys, tmp_path):
    assert check.main(["--out", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().out
    assert (
        said.startswith("no GPU: torch")
        and said.count("\n") == 1
        and not (tmp_path / "none").exists()
    )
    with pytest.raises(SystemExit):
        check.main(["fats", "--device", "cpu"])
    assert (
        "no part is called 'fats'; there are first, right, waiting, fast" in capsys.readouterr().err
    )


def test_a_part_that_breaks_costs_no_other_and_the_report_says_which(monkeypatch, capsys, tmp_path):
    def ended(command, env, log, most_s, shown):
        part = command[3]
        found = check.read_findings(tmp_path / f"{part}.json")
        found.columns, found.table, found.began = ["step", "ms"], [["a | <b>", "1"]], "a step"
        found.done, found.headline = part != "memory", f"of {part}"
        found.save()
        return -9 if part == "memory" else 0

    monkeypatch.setattr(check, "ran", ended)
    assert check.main(["memory", "twin", "--device", "cpu", "--tiny", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert (
        "memory: the part ended with exit code -9 (SIGKILL), in 'a step'" in shown
        and "of twin" in shown
    )
    assert shown.strip().endswith("report.html")
    markdown, page = ((tmp_path / f"report.{kind}").read_text() for kind in ("md", "html"))
    assert f"- torch: {torch.__version__}" in markdown and "| a \\| <b> | 1 |" in markdown
    assert "a | &lt;b&gt;" in page and "FAILED the part ended" in page
    assert (
        "[memory.output.txt](memory.output.txt)" in markdown
        and '<a href="memory.output.txt">' in page
    )
