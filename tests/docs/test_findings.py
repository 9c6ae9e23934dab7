"""The losses on the pages are those that the benchmarks print from the rows that are kept."""

import json
import re

import pytest
from benchmarks.bytes import shard_wire
from benchmarks.compare import queue
from benchmarks.finetune import experiment as finetune
from benchmarks.frontier import paired
from benchmarks.long_rounds import experiment as long_rounds
from benchmarks.long_rounds import grid as long_rounds_grid
from benchmarks.long_rounds import table as long_rounds_table
from benchmarks.paper import claims as paper_claims
from benchmarks.paper import experiment as paper
from benchmarks.second_round import corrected
from benchmarks.second_round import experiment as second_round
from benchmarks.size_law import laws, predict
from benchmarks.size_law.laws import published
from benchmarks.size_law.run import rows as size_law_rows
from benchmarks.size_law.table import table as size_law_table
from pages import ROOT

from detonation.train.verbs.plan import Question, plan

INTERVAL = re.compile(r"\[([+-]\d+\.\d)(?: %)?, ([+-]\d+\.\d)(?: %)?\]")
PAGES = [
    "README.md",
    *(
        f"docs/{name}.md"
        for name in ("findings", "research", "which-scheme", "networks", "your-loop")
    ),
]
PAGES += ["docs/tutorials/larger-than-a-node.md", "research/frontier.md", "research/long-rounds.md"]
PAGES.append("research/size-law.md")


@pytest.fixture(scope="module")
def printed():
    """The intervals of all tables of losses and of a plan, as their ends are written."""
    shards = (ROOT / "benchmarks/results/2026-11-22-shard-wire.jsonl").read_text().splitlines()
    done = second_round.rows(ROOT / second_round.RESULTS)
    text = [
        second_round.pairs(done),
        *(second_round.table(done, study) for study in second_round.REFERENCES),
    ]
    text += [claim(paper.rows(ROOT / paper.LOSSES)) for claim in paper_claims.CLAIMS]
    text.append(finetune.table(queue.rows(ROOT / finetune.RESULTS)))
    text.append(
        long_rounds_table.table(long_rounds_grid.methods, queue.rows(ROOT / long_rounds.RESULTS))
    )
    text += paired.table(paired.rows([ROOT / path for path in paired.RESULTS]))
    sizes = size_law_rows(ROOT / "benchmarks/results/size-law")
    text += [published(), size_law_table(sizes), laws.table(sizes), predict.table(predict.PATH)]
    text += shard_wire.table([json.loads(line) for line in shards])
    asked = Question(
        parameters="1.2b", link="1gbit,1ms", step_time=0.35, replicas=8, shards=8
    )  # of docs/networks.md
    text += [option["loss_text"] for option in plan(asked)["options"]]
    return set(INTERVAL.findall("\n".join(text)))


def test_the_tables_are_those_that_the_rows_make():
    page = (ROOT / second_round.PAGE).read_text()
    anew = second_round.page(page, second_round.rows(ROOT / second_round.RESULTS))
    tables = page.split(second_round.HEADING)[1]
    assert all(
        f"`python -m benchmarks.second_round table {study}`" in tables
        for study in second_round.REFERENCES
    )
    assert page == anew, "run: python -m benchmarks.second_round page"


def test_what_is_left_among_all_differences_is_on_the_page():
    report = corrected.report(second_round.rows(ROOT / second_round.RESULTS))
    count, alone, lost = re.match(r"(\d+) diff.*, (\d+) excl.*, and (\d+) are not", report).groups()
    page = " ".join((ROOT / "docs/findings.md").read_text().split())
    assert f"Of {count} differences {alone} exclude zero" in page
    assert lost == "3" and "all but three stay" in page


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.7062), (2, 4.3027), (7, 2.3646), (30, 2.0423)])
def test_p_values_are_those_of_the_tables_of_student(freedom, t):
    assert corrected.two_sided(t, freedom) == pytest.approx(0.05, abs=1e-5)
    assert corrected.two_sided(0.0, freedom) == 1


@pytest.mark.parametrize("page", PAGES)
def test_every_interval_is_printed_by_a_benchmark(page, printed):
    found = INTERVAL.findall((ROOT / page).read_text())
    assert [f"[{low}, {high}]" for low, high in found if (low, high) not in printed] == []
