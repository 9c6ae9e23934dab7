"""The functions of the verbs (subcommands), which only call other modules and print their results.
Also prints errors.

Slow imports are delayed until a verb needs them.
"""

import dataclasses
import errno
import importlib.machinery
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from textwrap import fill
from types import ModuleType
from typing import Any, TextIO, TypeVar

from detonation.cli import arguments as of
from detonation.report.words import printable


def say(verb: of.Common, line: str) -> None:
    """Prints lines for people: to stdout, or with --json to stderr."""
    line = "\n".join(map(printable, line.splitlines()))
    if verb.json:
        _to_stderr(line)
    else:
        print(line, flush=True)  # flush at once, because `meet` prints no more lines for hours


def _output(verb: of.Common) -> TextIO:
    """Returns the stream for tables for people: stdout, or stderr with --json."""
    if verb.json:
        return sys.stderr
    return sys.stdout


def explain(verb: of.Common, error: Exception) -> int:
    """Prints an error in one line, unless another rank has already printed it.

    Returns the exit code: 2 for bad input, 128 + n if signal n asked the process to end, and 1
    otherwise.
    """
    from detonation.cluster.processes.failure import StopRequested, WorldError, describe

    if isinstance(error, StopRequested):
        return fail(str(error), error.code, verb.json)
    world = None
    if isinstance(error, WorldError):
        world = error
    if verb.debug:
        trace = ""
        if world:
            trace = world.failure.trace
        print(trace or "".join(traceback.format_exception(error)), file=sys.stderr, end="")
    bad_input = isinstance(error, ValueError)
    if world:
        bad_input = world.failure.bad_input
    code = 1
    if bad_input:
        code = 2
    if world and world.reported:
        return code
    out = getattr(verb, "out", None)
    name = getattr(error, "filename", None)
    unwritable = isinstance(name, str) and out and _is_part(Path(name).absolute(), out.absolute())
    said = "choose another --out" in str(error)
    remedy = ""
    if out and not said and os.strerror(errno.ENOSPC) in str(error):
        remedy = ": free some space, or choose another --out"
    elif unwritable and not said:
        remedy = ": choose another --out"
    return fail(describe(error) + remedy, code, verb.json)


def _is_part(path: Path, out: Path) -> bool:
    """True if `path` is a file in `out`, a directory above `out`, or the temporary file for
    `out`.
    """
    return path.is_relative_to(out) or out.is_relative_to(path) or str(path) == f"{out}.part"


def fail(line: str, code: int, as_json: bool) -> int:
    """Prints an error; with --json also as a JSON object on stdout. Returns `code`."""
    try:
        if as_json:
            print(json.dumps({"error": line, "code": code}), flush=True)
    finally:  # report the error on stderr even if stdout is closed
        _to_stderr(f"error: {printable(line)}")
    return code


def _to_stderr(line: str) -> None:
    """Prints a line to stderr. Ignores errors of stderr, so that the command can still print to
    stdout.
    """
    try:
        print(line, file=sys.stderr)
    except OSError:
        from detonation.report.terminal import discard

        discard(sys.stderr)


_R = TypeVar("_R")
SHORTCUTS = {
    "scheme": "scheme.name",
    "steps": "train.steps",
    "lr": "optimizer.lr",
    "model": "model.name",
    "data": "data.source",
    "init_from": "train.init_from",
}
"""For each flag of `Shortcuts` and `Experiment`, the key of the recipe that it sets."""
SETTING_FLAGS = {
    "link": "mesh.link",
    "elastic": "mesh.elastic",
    "meet": "mesh.meet",
    "checkpoint_every": "train.checkpoint_every",
    "keep": "train.keep",
    "log": "train.log_updates",
    "publish": "train.publish",
    "logger": "train.loggers",
}
"""For each other flag that sets a value, the key of the recipe that it sets."""


def requested(kind: type[_R], verb: of.Common) -> _R:
    """Builds a request of the class `kind`. Each field of the request gets the value of the flag of
    `verb` with the same name.
    """
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    flags = {field.name: getattr(verb, field.name) for field in dataclasses.fields(verb)}
    # Precedence: --set overrides a flag of SHORTCUTS, and every other flag overrides --set.
    other = {flag: key for flag, key in SETTING_FLAGS.items() if flag not in known}
    settings = assignments(other, flags)
    sets = chain(*flags.pop("set", ()))
    flags["overrides"] = (*assignments(SHORTCUTS, flags), *sets, *settings)
    flags["to_stderr"] = flags.pop("json")
    given = {name: flags[name] for name in known if flags.get(name) is not None}
    return kind(**given)


def assignments(keys: Mapping[str, str], flags: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns assignments to keys of the recipe, from the flags that the user gave."""
    found = []
    for flag, key in keys.items():
        value = flags.get(flag)
        if value is not None and value is not False and value != ():
            # Quotes mark the value as text: in `--data 2024`, 2024 is a directory and not a number.
            found.append(f"{key}={json.dumps(value, ensure_ascii=False)}")
    return tuple(found)


def _train(verb: of.Train) -> dict[str, Any] | None:
    if verb.recipe is None or verb.print:
        return _print_recipe(verb)
    from detonation.report.terminal import show
    from detonation.train.recipe.resolve import Request
    from detonation.train.run.start import is_first, run_training

    summary = run_training(requested(Request, verb), lambda error: explain(verb, error))
    if not is_first():
        return None
    notes = []
    if "stopped_after" not in summary:
        notes = _page_of(Path(summary["directory"]))
    show(summary, notes, _output(verb))
    return summary


def _page_of(directory: Path) -> list[str]:
    """Writes the page of a finished run; returns a line with the path of the page."""
    from detonation.report.page import try_write

    # no page without a summary: an earlier start may have left only metrics in this directory
    if not (directory / "summary.json").is_file():
        return [
            f"{directory} holds no summary, because another replica writes it: run detonation"
            " report on that machine"
        ]
    return [try_write([directory])]


def _print_recipe(verb: of.Train) -> dict[str, Any]:
    """Prints a recipe of the package. Without a name, prints the names of recipes, schemes, models
    and data sets.
    """
    from detonation.choices import unknown
    from detonation.train.recipe.resolve import headline, names_of_parts, shipped_recipes
    from detonation.whole_files import read_text

    if verb != of.Train(recipe=verb.recipe, print=verb.print, json=verb.json, debug=verb.debug):
        raise ValueError(
            "train needs a recipe, and --print takes no other flag: run detonation train"
            " without arguments for a list of the recipes"
        )
    texts = {name: file.read_text(encoding="utf-8") for name, file in shipped_recipes().items()}
    if verb.recipe is None:
        names = names_of_parts()
        about = {name: headline(text) for name, text in texts.items()}
        rows = about | {f"{kind}:": ", ".join(found) for kind, found in names.items()}
        for head, text in rows.items():
            line = f"{head:15} {text}"
            say(verb, fill(line, 100, subsequent_indent=" " * 16, break_on_hyphens=False))
        return {"recipes": about, **names}
    name = str(verb.recipe)
    if name not in texts and verb.recipe.is_file():
        texts[name] = read_text(verb.recipe, links=True)
    if name not in texts:
        raise unknown("recipe", name, texts)
    say(verb, texts[name].removesuffix("\n"))
    return {name: texts[name]}


def _compare(verb: of.Compare) -> dict[str, Any]:
    from detonation.report.page import try_write
    from detonation.report.terminal import show_all
    from detonation.train.recipe.resolve import Request
    from detonation.train.verbs import compare

    schemes = [name.strip() for name in verb.schemes.split(",") if name.strip()]
    summaries = compare.compare_runs(requested(Request, verb), schemes, [*chain(*verb.vary)])
    page = Path(summaries[0]["directory"]).parent / "report.html"
    finished = [Path(summary["directory"]) for summary in summaries if "error" not in summary]
    notes = []
    report = None
    if finished:
        notes = [try_write(finished, page)]
        report = str(page)
    show_all(summaries, notes, _output(verb))
    return {"good": len(finished) == len(summaries), "runs": summaries, "report": report}


def _simulate(verb: of.Simulate) -> dict[str, Any]:
    if verb.recipe is None:
        raise ValueError(
            "simulate needs a recipe: run detonation train without arguments for a list of the"
            " recipes"
        )
    from detonation.report.page import try_write
    from detonation.report.terminal import show
    from detonation.train.verbs import simulate

    summary = simulate.simulate(requested(simulate.Simulation, verb))
    show(summary, [try_write([Path(summary["directory"])])], _output(verb))
    return summary


def _probe(verb: of.Probe) -> dict[str, Any] | None:
    from detonation.report.terminal import show_profile
    from detonation.train.verbs import probe

    if verb.out.is_dir() or not verb.out.parent.is_dir():
        raise ValueError(f"--out is {verb.out}, but must be a file in a directory that exists")
    profile = probe.probe(requested(probe.ProbeRequest, verb), lambda error: explain(verb, error))
    if profile is None:
        return None
    table = profile.write(verb.out)
    show_profile(table, _output(verb))
    say(verb, f"profile: {verb.out}")
    return table


class _LazyTorch(ModuleType):
    """Stands for torch during imports, and loads torch when code reads an attribute of torch.

    `importlib.util.LazyLoader` would load torch already at the second `import`, because that import
    reads `__spec__`.
    """

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get("torch") is self:
            del sys.modules["torch"]
        return getattr(importlib.import_module("torch"), name)


@contextmanager
def _lazy_torch() -> Iterator[None]:
    """Context manager that delays the import of torch. In its `with` block, no module may import a
    submodule of torch.
    """
    module = sys.modules.setdefault("torch", _LazyTorch("torch"))
    if isinstance(module, _LazyTorch):
        module.__spec__ = importlib.machinery.PathFinder.find_spec("torch")
    try:
        yield
    finally:
        if isinstance(sys.modules.get("torch"), _LazyTorch):
            del sys.modules["torch"]


def _plan(verb: of.Plan) -> dict[str, Any]:
    # a plan without a recipe does not need torch, whose import takes more than a second
    with _lazy_torch():
        from detonation.report.terminal import show_plan
        from detonation.train.verbs import plan

    found = plan.plan(requested(plan.Question, verb))
    show_plan(found, _output(verb), verb.all)
    return found


def _report(verb: of.Report) -> dict[str, Any]:
    from detonation.report.page import write_page

    page = str(write_page(verb.directories, verb.out))
    say(verb, f"report: {page}")
    return {"report": page}


def _verify(verb: of.Verify) -> dict[str, Any]:
    from detonation.checkpoint.verify import checkpoints, verify
    from detonation.train.run.log_check import checked_log

    checked = [verify(path) for path in checkpoints(verb.directory)]
    for one in checked:
        say(verb, one.line())
    keys = ("good", "faults", "differences", "elsewhere", "apart")
    found = []
    for one in checked:
        values = {key: getattr(one, key) for key in keys}
        found.append({"path": str(one.path), **values})
    saved = max((one.step for one in checked if not one.faults), default=0)
    logs, faults = checked_log(verb.directory, saved)
    for line in [*(log.line() for log in logs), *faults]:
        say(verb, line)
    whole = not faults and not any(log.fault for log in logs)
    files = [
        {"path": str(log.path), "first": log.begun + 1, "last": log.last, "fault": log.fault}
        for log in logs
    ]
    good = whole and all(one.good for one in checked)
    return {"good": good, "checkpoints": found, "updates": files, "log_faults": faults}


def _export(verb: of.Export) -> dict[str, Any]:
    from detonation.train.verbs import export

    exported = export.export(verb.directory, verb.out, verb.trust_code)
    for line in exported["rejected"]:
        say(verb, f"warning: {line}")
    mean = ""
    if "replicas" in exported:
        mean = f", the mean of the {exported['replicas']} replicas that are here"
    say(
        verb,
        f"{exported['checkpoint']}: {exported['num_parameters']:,} parameters written to"
        f" {verb.out}{mean}",
    )
    if not exported["for_transformers"]:
        say(
            verb,
            "the exported model is no model of transformers: load its state dict with"
            " safetensors.torch.load_model",
        )
    return exported


def _follow(verb: of.Follow) -> dict[str, Any]:
    from detonation.train.verbs import follow

    found = follow.follow_run(requested(follow.Following, verb))
    steps = ""
    if "replayed" in found:
        steps = f", {found['replayed']} steps replayed"
    saved = ""
    if "checkpoint" in found:
        saved = f", checkpoint: {found['checkpoint']}"
    say(verb, f"step {found['step']}{steps}, fingerprint {found['fingerprint'][:16]}{saved}")
    return found


def _meet(verb: of.Meet) -> None:
    from detonation.cluster.survive.elastic_axis import serve_meeting

    serve_meeting(verb.address, lambda where: say(verb, f"replicas meet at {where}"))


def _fetch(verb: of.Fetch) -> dict[str, Any]:
    from detonation.data import SOURCES
    from detonation.data.packages import fetch

    if not verb.names:
        raise ValueError(f"fetch needs at least one name: {', '.join(SOURCES)}")
    paths = {}
    for name in verb.names:
        paths[name] = str(fetch(name))
        say(verb, f"{name}: {paths[name]}")
    return paths


VERBS: dict[type, Any] = {
    of.Train: _train,
    of.Compare: _compare,
    of.Simulate: _simulate,
    of.Probe: _probe,
    of.Plan: _plan,
    of.Report: _report,
    of.Verify: _verify,
    of.Export: _export,
    of.Follow: _follow,
    of.Meet: _meet,
    of.Fetch: _fetch,
}
