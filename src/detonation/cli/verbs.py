"""What each verb does: call and print, no more. Heavy imports wait until they are needed."""

import sys
from pathlib import Path
from typing import Any

from detonation.cli.answers import explain, say
from detonation.cli.arguments import (
    Compare,
    Env,
    Export,
    Fetch,
    Plan,
    Probe,
    Report,
    Simulate,
    Train,
    Verify,
)


def flat(groups: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """The assignments of all --set flags, in order."""
    return tuple(assignment for group in groups for assignment in group)


def _train(verb: Train) -> dict[str, Any] | None:
    from detonation.report.page import try_write
    from detonation.report.table import show
    from detonation.train.run.run import Request, is_first, run

    request = Request(
        verb.recipe,
        flat(verb.set),
        verb.replicas,
        verb.shards,
        verb.link,
        verb.out,
        verb.resume,
        verb.stop_after,
        verb.checkpoint_every,
        verb.keep,
        verb.interface,
        verb.logger,
        to_stderr=verb.json,
    )
    summary = run(request, lambda error: explain(verb, error))
    if not is_first():
        return None
    page = [] if "stopped_after" in summary else [try_write([Path(summary["directory"])])]
    show(summary, page, sys.stderr if verb.json else sys.stdout)
    return summary


def _compare(verb: Compare) -> dict[str, Any]:
    from detonation.report.page import try_write
    from detonation.report.table import show_all
    from detonation.train.run.run import Request
    from detonation.train.verbs.compare import compare

    request = Request(
        verb.recipe,
        flat(verb.set),
        verb.replicas,
        verb.shards,
        verb.link,
        verb.out,
        lab=verb.lab,
        to_stderr=verb.json,
    )
    schemes = [name.strip() for name in verb.schemes.split(",") if name.strip()]
    summaries = compare(request, schemes, lambda error: explain(verb, error))
    directories = [Path(summary["directory"]) for summary in summaries]
    page = directories[0].parent / "report.html"
    show_all(summaries, [try_write(directories, page)], sys.stderr if verb.json else sys.stdout)
    return {"runs": summaries, "report": str(page)}


def _simulate(verb: Simulate) -> dict[str, Any]:
    from detonation.report.page import try_write
    from detonation.report.table import show
    from detonation.train.verbs.simulate import Simulation, simulate

    summary = simulate(
        Simulation(
            verb.recipe, flat(verb.set), verb.replicas, verb.total_batch, verb.profile, verb.out, to_stderr=verb.json
        )
    )
    show(summary, [try_write([Path(summary["directory"])])], sys.stderr if verb.json else sys.stdout)
    return summary


def _probe(verb: Probe) -> dict[str, Any] | None:
    from detonation.report.profile_table import show_profile
    from detonation.train.verbs.probe import probe

    profile = probe(
        verb.recipe, flat(verb.set), verb.replicas, verb.shards, verb.link, lambda error: explain(verb, error)
    )
    if profile is None:
        return None
    table = profile.write(verb.out)
    show_profile(table, sys.stderr if verb.json else sys.stdout)
    say(verb, f"profile: {verb.out}")
    return table


def _plan(verb: Plan) -> dict[str, Any]:
    from detonation.report.plan_table import show_plan
    from detonation.train.verbs.plan import Question, plan

    found = plan(
        Question(
            verb.recipe,
            flat(verb.set),
            verb.profile,
            verb.link,
            verb.step_time,
            verb.replicas,
            verb.shards,
            verb.parameters,
        )
    )
    show_plan(found, sys.stderr if verb.json else sys.stdout)
    return found


def _report(verb: Report) -> dict[str, Any]:
    from detonation.report.page import write

    written = write(list(verb.directories), verb.out, verb.plan)
    say(verb, f"{written.page}, and each figure as PNG in {written.pictures[0].parent}")
    return {"report": str(written.page), "figures": [str(path) for path in written.pictures]}


def _verify(verb: Verify) -> dict[str, Any]:
    from detonation.checkpoint.verify import checkpoints, verify

    verdicts = [verify(path) for path in checkpoints(verb.directory)]
    for verdict in verdicts:
        say(verb, verdict.line())
    found = [{"path": str(v.path), "good": v.good, "faults": v.faults, "differences": v.differences} for v in verdicts]
    return {"good": all(verdict.good for verdict in verdicts), "checkpoints": found}


def _export(verb: Export) -> dict[str, Any]:
    from detonation.train.verbs.export import export

    exported = export(verb.directory, verb.out)
    say(verb, f"{exported['checkpoint']}: {exported['num_parameters']:,} parameters written to {verb.out}")
    return exported


def _fetch(verb: Fetch) -> dict[str, Any]:
    from detonation.data import SOURCES
    from detonation.data.download.fetch import fetch

    if not verb.names:
        raise ValueError(f"fetch needs at least one name: {', '.join(SOURCES)}")
    paths = {}
    for name in verb.names:
        paths[name] = str(fetch(name))
        say(verb, f"{name}: {paths[name]}")
    return paths


def _env(verb: Env) -> dict[str, Any]:
    from detonation.train.output.environment import environment, lines

    found = environment()
    for line in lines(found):
        say(verb, line)
    return found


VERBS: dict[type, Any] = {
    Train: _train,
    Compare: _compare,
    Simulate: _simulate,
    Probe: _probe,
    Plan: _plan,
    Report: _report,
    Verify: _verify,
    Export: _export,
    Fetch: _fetch,
    Env: _env,
}
