"""The verbs: each calls and prints, no more; and how errors are shown.

Heavy imports wait until they are needed.
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
from typing import Any, TypeVar

from detonation.cli import arguments as of
from detonation.report.words import printable


def say(verb: of.Common, line: str) -> None:
    """Prints lines for people: to stderr where stdout is for a program."""
    line = "\n".join(map(printable, line.splitlines()))
    if verb.json:
        _to_stderr(line)
    else:
        print(line, flush=True)  # `meet` serves for hours after its line


def explain(verb: of.Common, error: Exception) -> int:
    """Prints an error in one line, unless another rank has; returns the exit code: 2 for bad input,
    else 1."""
    from detonation.cluster.processes.failure import WorldError, describe

    world = error if isinstance(error, WorldError) else None
    if verb.debug:
        trace = world.failure.trace if world else ""
        print(trace or "".join(traceback.format_exception(error)), file=sys.stderr, end="")
    if world and world.reported:
        return 2 if world.failure.bad_input else 1
    bad_input = world.failure.bad_input if world else isinstance(error, ValueError)
    out, name = getattr(verb, "out", None), getattr(error, "filename", None)
    unwritable = isinstance(name, str) and out and _is_part(Path(name).absolute(), out.absolute())
    said = "choose another --out" in str(error)
    full = out and not said and os.strerror(errno.ENOSPC) in str(error)
    remedy = (
        ": free some space, or choose another --out"
        if full
        else ": choose another --out" * bool(unwritable and not said)
    )
    return fail(describe(error) + remedy, 2 if bad_input else 1, verb.json)


def _is_part(path: Path, out: Path) -> bool:
    """True for a file in `out`, a directory above it, and the file in which `out` begins."""
    return path.is_relative_to(out) or out.is_relative_to(path) or str(path) == f"{out}.part"


def fail(line: str, code: int, as_json: bool) -> int:
    """Prints the line of an error, for a program too; returns `code`."""
    try:
        if as_json:
            print(json.dumps({"error": line, "code": code}), flush=True)
    finally:  # also where nobody reads stdout
        _to_stderr(f"error: {printable(line)}")
    return code


def _to_stderr(line: str) -> None:
    """Prints a line to stderr, which may take none: the program that reads stdout still gets its
    object."""
    try:
        print(line, file=sys.stderr)
    except OSError:
        from detonation.report.terminal import discard

        discard(sys.stderr)


_R = TypeVar("_R")
SHORTCUTS = {
    "scheme": "scheme.name", "steps": "train.steps", "lr": "optimizer.lr", "model": "model.name", "data": "data.source",
    "init_from": "train.init_from",
}  # fmt: skip
"""The recipe's key for each flag of `Shortcuts` and `Experiment`."""
SETTING_FLAGS = {
    "link": "mesh.link", "elastic": "mesh.elastic", "meet": "mesh.meet", "checkpoint_every": "train.checkpoint_every",
    "keep": "train.keep", "log": "train.log_updates", "publish": "train.publish", "logger": "train.loggers",
}  # fmt: skip
"""The recipe's key for each other flag that stands for a setting."""


def requested(kind: type[_R], verb: of.Common) -> _R:
    """The request of this `kind`, whose fields are named like the flags of `verb`; a flag left out
    has its default."""
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    flags = {field.name: getattr(verb, field.name) for field in dataclasses.fields(verb)}
    # --set counts over a shortcut, and any other flag over --set
    settings = assignments(
        {flag: key for flag, key in SETTING_FLAGS.items() if flag not in known}, flags
    )
    renamed = {
        "overrides": (*assignments(SHORTCUTS, flags), *chain(*flags.pop("set", ())), *settings),
        "to_stderr": flags.pop("json"),
    }
    return kind(
        **{
            name: value
            for name, value in {**flags, **renamed}.items()
            if name in known and value is not None
        }
    )


def assignments(keys: Mapping[str, str], flags: Mapping[str, Any]) -> tuple[str, ...]:
    """The assignments to the recipe's `keys` that given flags stand for."""
    values = {key: flags.get(flag) for flag, key in keys.items()}
    given = {
        key: value
        for key, value in values.items()
        if value is not None and value is not False and value != ()
    }
    # A text is quoted: `--data 2024` is the directory of that name, and no number.
    return tuple(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items())


def _train(verb: of.Train) -> dict[str, Any] | None:
    if verb.recipe is None or verb.print:
        return _print_recipe(verb)
    from detonation.report.terminal import show
    from detonation.train.recipe.resolve import Request
    from detonation.train.run.start import is_first, run_training

    summary = run_training(requested(Request, verb), lambda error: explain(verb, error))
    if not is_first():
        return None
    page = [] if "stopped_after" in summary else _page_of(Path(summary["directory"]))
    show(summary, page, sys.stderr if verb.json else sys.stdout)
    return summary


def _page_of(directory: Path) -> list[str]:
    """Writes the page of a run that has ended; returns a line that says where it is."""
    from detonation.report.page import try_write

    if not (directory / "summary.json").is_file():  # an earlier start may have left metrics here
        return [
            f"{directory} holds no summary, because another replica writes it: run detonation"
            " report on that machine"
        ]
    return [try_write([directory])]


def _print_recipe(verb: of.Train) -> dict[str, Any]:
    """Prints the text of a recipe of the package, or the names of all that a run can be made of."""
    from detonation.choices import unknown
    from detonation.train.recipe.resolve import headline, names_of_parts, shipped_recipes

    if verb != of.Train(recipe=verb.recipe, print=verb.print, json=verb.json, debug=verb.debug):
        raise ValueError(
            "train needs a recipe, and --print no other flag: detonation train alone lists the"
            " recipes"
        )
    texts = {name: file.read_text(encoding="utf-8") for name, file in shipped_recipes().items()}
    if verb.recipe is None:
        names, about = names_of_parts(), {name: headline(text) for name, text in texts.items()}
        rows = about | {f"{kind}:": ", ".join(found) for kind, found in names.items()}
        for row in rows.items():
            say(
                verb,
                fill(
                    "{:15} {}".format(*row), 100, subsequent_indent=" " * 16, break_on_hyphens=False
                ),
            )
        return {"recipes": about, **names}
    name = str(verb.recipe)
    if name not in texts:
        raise unknown("recipe", name, texts)
    say(verb, texts[name].removesuffix("\n"))
    return {name: texts[name]}


def _compare(verb: of.Compare) -> dict[str, Any]:
    from detonation.report.page import try_write
    from detonation.report.terminal import show_all
    from detonation.train.recipe.resolve import Request
    from detonation.train.verbs.compare import compare_runs

    schemes = [name.strip() for name in verb.schemes.split(",") if name.strip()]
    summaries = compare_runs(requested(Request, verb), schemes, [*chain(*verb.vary)])
    page = Path(summaries[0]["directory"]).parent / "report.html"
    finished = [Path(summary["directory"]) for summary in summaries if "error" not in summary]
    show_all(
        summaries,
        [try_write(finished, page)] if finished else [],
        sys.stderr if verb.json else sys.stdout,
    )
    return {
        "good": len(finished) == len(summaries),
        "runs": summaries,
        "report": str(page) if finished else None,
    }


def _simulate(verb: of.Simulate) -> dict[str, Any]:
    if verb.recipe is None:
        raise ValueError("simulate needs a recipe: detonation train alone lists them")
    from detonation.report.page import try_write
    from detonation.report.terminal import show
    from detonation.train.verbs.simulate import Simulation, simulate

    summary = simulate(requested(Simulation, verb))
    show(
        summary, [try_write([Path(summary["directory"])])], sys.stderr if verb.json else sys.stdout
    )
    return summary


def _probe(verb: of.Probe) -> dict[str, Any] | None:
    from detonation.report.terminal import show_profile
    from detonation.train.verbs.probe import ProbeRequest, probe

    if verb.out.is_dir() or not verb.out.parent.is_dir():  # said before the links are measured
        raise ValueError(f"--out is {verb.out}, but must be a file in a directory that exists")
    profile = probe(requested(ProbeRequest, verb), lambda error: explain(verb, error))
    if profile is None:
        return None
    table = profile.write(verb.out)
    show_profile(table, sys.stderr if verb.json else sys.stdout)
    say(verb, f"profile: {verb.out}")
    return table


class _LazyTorch(ModuleType):
    """Stands for torch while others import it, and loads it when they use something of it.

    `importlib.util.LazyLoader` loads at the second `import` of a name, which reads `__spec__`; this
    does not.
    """

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get("torch") is self:
            del sys.modules["torch"]
        return getattr(importlib.import_module("torch"), name)


@contextmanager
def _lazy_torch() -> Iterator[None]:
    """Inside the block `import torch` is free; no module may import a submodule of it there."""
    module = sys.modules.setdefault("torch", _LazyTorch("torch"))
    if isinstance(module, _LazyTorch):
        module.__spec__ = importlib.machinery.PathFinder.find_spec("torch")
    try:
        yield
    finally:
        if isinstance(sys.modules.get("torch"), _LazyTorch):
            del sys.modules["torch"]


def _plan(verb: of.Plan) -> dict[str, Any]:
    with (
        _lazy_torch()
    ):  # without a recipe a plan is arithmetic, and the import of torch takes over a second
        from detonation.report.terminal import show_plan
        from detonation.train.verbs.plan import Question, plan

    found = plan(requested(Question, verb))
    show_plan(found, sys.stderr if verb.json else sys.stdout, verb.all)
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
    found = [{"path": str(one.path), **{key: getattr(one, key) for key in keys}} for one in checked]
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
    from detonation.train.verbs.export import export

    exported = export(verb.directory, verb.out, verb.trust_code)
    for line in exported["rejected"]:
        say(verb, f"warning: {line}")
    mean = (
        f", the mean of the {exported['replicas']} replicas that are here"
        if "replicas" in exported
        else ""
    )
    say(
        verb,
        f"{exported['checkpoint']}: {exported['num_parameters']:,} parameters written to"
        f" {verb.out}{mean}",
    )
    if not exported["for_transformers"]:
        say(
            verb,
            "it is no model of transformers: load its state dict with safetensors.torch.load_model",
        )
    return exported


def _follow(verb: of.Follow) -> dict[str, Any]:
    from detonation.train.verbs.follow import Following, follow_run

    found = follow_run(requested(Following, verb))
    steps = f", {found['replayed']} steps replayed" if "replayed" in found else ""
    saved = f", checkpoint: {found['checkpoint']}" if "checkpoint" in found else ""
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
    of.Train: _train, of.Compare: _compare, of.Simulate: _simulate, of.Probe: _probe, of.Plan: _plan,
    of.Report: _report, of.Verify: _verify, of.Export: _export, of.Follow: _follow, of.Meet: _meet, of.Fetch: _fetch,
}  # fmt: skip
