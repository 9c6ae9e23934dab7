"""Streams: a batch is a function of step and part, positions are exact, and nothing held out is trained on."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import own
from detonation.cluster.shares import micro_batches
from detonation.data import batch, load_dataset
from detonation.data.dataset import Streamed
from detonation.data.readers import documents
from detonation.train.loop.examples import draws
from detonation.train.recipe.schema import TrainConfig

datasets = pytest.importorskip("datasets")


@pytest.fixture
def source(tmp_path):
    return own.json_lines(tmp_path / "rows.jsonl", count=300)


def loaded(source, **arguments):
    return load_dataset(
        "text", {"source": str(source), "streaming": True, "context": 16, **arguments}
    )


def drawn(data, step, part=0, parts=2, size=3):
    return batch(data.train, seed=0, step=step, part=part, parts=parts, size=size)["input_ids"]


def test_a_batch_is_a_function_of_step_and_part_alone(source):
    data, other = loaded(source), loaded(source)
    assert isinstance(data.train, Streamed)
    forward = [drawn(data, step) for step in range(30)]  # more than one epoch
    assert len({ids.numpy().tobytes() for ids in forward}) > 20
    for step in (0, 25, 3):
        assert torch.equal(drawn(other, step), forward[step])
    assert not torch.equal(drawn(data, 0, part=1), forward[0])


def test_the_parts_have_all_documents_but_those_held_out_and_begin_again(source):
    data = loaded(source)
    texts = [json.loads(line)["text"].encode() for line in source.read_text().splitlines()]
    per_part = [
        bytes(torch.cat([drawn(data, step, part) for step in range(200)]).flatten().tolist())
        for part in (0, 1)
    ]
    found = [set(part.split(b"\n\n")[:-1]) for part in per_part]
    assert found[0] | found[1] == set(texts[200:]) and not found[0] & found[1]
    held_out = bytes(data.validation.ids.flatten().tolist())
    assert held_out.startswith(b"\n\n".join(texts[:3]))
    assert per_part[0].count(texts[200] + b"\n\n") > 1  # the next epoch


@pytest.mark.parametrize("words", [False, True], ids=["bytes", "tokens"])
@pytest.mark.parametrize("step", [1, 8, 40])
def test_a_position_continues_exactly_and_reads_nothing_again(source, tmp_path, words, step):
    arguments = {"tokenizer": str(own.tokenizer(tmp_path / "words"))} if words else {}
    data, later = loaded(source, **arguments), loaded(source, **arguments)
    for before in range(step):
        drawn(data, before)
    position = json.loads(json.dumps(data.train.position(0, 2)))
    expected = [drawn(data, after) for after in range(step, step + 40)]
    read = []
    ids = later.train._ids
    later.train._ids = lambda row: read.append(row) or ids(row)
    later.train.go_to(0, 2, position)
    assert torch.equal(drawn(later, step), expected[0])
    drawn(later, 0)  # as a measurement does
    read.clear()
    assert torch.equal(drawn(later, step + 1), expected[1])
    assert len(read) <= 10
    assert all(torch.equal(drawn(later, step + i), expected[i]) for i in range(1, 40))


@pytest.mark.parametrize(
    "position",
    [
        {},
        {"at": 1},
        {"at": "x"},
        [],
        {"at": 1, "epoch": 0, "given": 0, "before": 3},
        {"at": 1, "epoch": 0, "given": 10**15, "before": None},
    ],
)
def test_a_strangers_position_is_one_line(source, position):
    with pytest.raises(ValueError, match="is no position in these data"):
        loaded(source).train.go_to(0, 2, position)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (None, {}, "sotu-sample is read as a whole: leave data.streaming out"),
        ("a.txt", {"split": "train"}, "split does not apply to source"),
        (
            "a.pdf",
            {},
            r"a\.pdf cannot be read as text: give files of type \.csv, \.jsonl, \.md, \.parquet",
        ),
        (
            "a.md",
            {},
            r"a\.md cannot be read as a stream: .* type \.csv, \.jsonl, \.parquet, \.txt$",
        ),
        (
            "a.jsonl",
            {"column": "body"},
            r"a\.jsonl, row 1 has no column body: name one of its columns, id",
        ),
        ("a.jsonl", {"context": 99_999}, "context must be at most"),
    ],
)
def test_what_cannot_be_streamed_is_one_line(tmp_path, make, arguments, message):
    if make:
        own.json_lines(tmp_path / make)
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path / make if make else "sotu-sample", **arguments)


def test_a_stream_that_is_all_held_out_ends_with_one_line(tmp_path):
    data = loaded(own.json_lines(tmp_path / "few.jsonl", count=20))
    with pytest.raises(ValueError, match=r"only held-out documents: leave data.streaming out"):
        drawn(data, 0)


def by_part(folder, counts, parts=2):
    """All documents of files with `counts` documents each, and those that each part reads in its first 2000 blocks."""
    rows = own.json_lines(folder.with_suffix(".all"), sum(counts)).read_text().splitlines(True)
    folder.mkdir()
    for number, count in enumerate(counts):
        start = sum(counts[:number])
        (folder / f"{number:02}.jsonl").write_text("".join(rows[start : start + count]))
    data = loaded(folder)
    found = []
    for part in range(parts):
        ids = torch.cat([drawn(data, step, part, parts, 40) for step in range(50)])
        found.append(set(bytes(ids.flatten().tolist()).split(b"\n\n")[:-1]))
    return [json.loads(row)["text"].encode() for row in rows], found


@pytest.mark.parametrize(
    "counts", [(150, 250), (205, 195), (10,) * 40], ids=lambda counts: f"{len(counts)} files"
)
def test_parts_of_small_files_share_what_is_not_held_out(tmp_path, counts):
    texts, found = by_part(tmp_path / "in", counts)
    assert [len(part) for part in found] == [100, 100]
    assert found[0] | found[1] == set(texts[200:])


def test_a_position_in_small_files_continues_exactly(tmp_path):
    by_part(tmp_path / "in", (205, 195))
    data, later = loaded(tmp_path / "in"), loaded(tmp_path / "in")
    for before in range(9):
        drawn(data, before, part=1)
    position = json.loads(json.dumps(data.train.position(1, 2)))
    expected = [drawn(data, step, part=1) for step in range(9, 60)]
    later.train.go_to(1, 2, position)
    assert all(torch.equal(drawn(later, 9 + i, part=1), ids) for i, ids in enumerate(expected))


def test_a_part_that_reads_its_large_files_again_tells_so(tmp_path, caplog):
    texts, found = by_part(tmp_path / "in", (2100, 60))
    assert found[1] == set(texts[2100:]) and not found[0] & found[1]
    (told,) = [record.getMessage() for record in caplog.records if record.name == "detonation"]
    assert told.startswith(f"{tmp_path / 'in'}: part 1 of 2 reads its own files again after ")


def test_a_stream_knows_the_names_and_sizes_of_its_files(tmp_path):
    by_part(tmp_path / "in", (205, 195))
    (tmp_path / "in" / "00").mkdir()
    own.json_lines(tmp_path / "in" / "00" / "more.jsonl", count=3)
    names = ["00/more.jsonl", "00.jsonl", "01.jsonl"]
    sizes = [(tmp_path / "in" / name).stat().st_size for name in names]
    assert list(loaded(tmp_path / "in").files.items()) == list(zip(names, sizes, strict=True))
    assert loaded(tmp_path / "in" / "00.jsonl").files == {".": sizes[1]}


def test_a_directory_is_streamed_as_it_is_read(source, tmp_path):
    """Without its directories and hidden files."""
    (tmp_path / "in" / "inner.jsonl").mkdir(parents=True)
    own.json_lines(tmp_path / "in" / "inner.jsonl" / "rows.jsonl", count=300)
    (tmp_path / "in" / ".gitignore").write_text("*")
    assert torch.equal(drawn(loaded(tmp_path / "in"), 0), drawn(loaded(source), 0))


def test_a_row_that_cannot_be_read_later_names_the_source(tmp_path):
    good = "".join(
        f"document {number}\n" for number in range(20_000)
    )  # the first 10,000 are read at once
    (tmp_path / "rows.csv").write_bytes(b"text\n" + good.encode() + "café\n".encode("latin-1"))
    data = loaded(tmp_path / "rows.csv")
    with pytest.raises(ValueError, match=r"^\S*rows\.csv is not UTF-8 \(byte 0xe9\)"):
        drawn(data, step=9000, parts=1)


@pytest.mark.parametrize("name", ["part[1].jsonl", "*.jsonl", "[v2]/rows.jsonl"])
def test_the_name_of_a_file_is_no_pattern(tmp_path, name):
    (tmp_path / "[v2]").mkdir()
    own.json_lines(tmp_path / "part1.jsonl", count=300)
    source = tmp_path / name
    source.write_text("".join(f'{{"text": "right {i}"}}\n' for i in range(300)))
    for each in (source, source.parent):
        if each != tmp_path:
            assert bytes(drawn(loaded(each), 0).flatten().tolist()).startswith(b"right 200")


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_stream_has_the_texts_of_the_whole_data(tmp_path, suffix):
    odd = ["00200", "200.10", "NA", "null", "true", "2020-01-02", " x ", "", "1e5", 'a,\n"b"']
    held_out = [f"document {i}" for i in range(200)]
    datasets.disable_progress_bars()
    made, file = datasets.Dataset.from_dict({"text": held_out + odd}), tmp_path / f"rows.{suffix}"
    getattr(made, {"jsonl": "to_json"}.get(suffix, f"to_{suffix}"))(file)
    whole = documents(file, None)[200:]
    assert whole == [text.encode() for text in odd if text]
    ids = drawn(loaded(file), 0, parts=1, size=8)
    assert bytes(ids.flatten().tolist()).startswith(b"".join(text + b"\n\n" for text in whole))


def test_a_row_of_a_stream_that_holds_no_text_is_named(tmp_path):
    source = own.json_lines(tmp_path / "rows.jsonl", count=300)
    for value, message in [
        ('{"text": 7}', r"rows\.jsonl, row 301 has 7 in column text, must be text"),
        (
            '{"body": "x"}',
            r"rows\.jsonl, row 301 has no column text: name one of its columns, body",
        ),
    ]:
        source.write_text("".join(source.read_text().splitlines(True)[:300]) + value)
        with pytest.raises(ValueError, match=message):
            drawn(loaded(source), 999, parts=1)


def test_a_saved_directory_is_streamed(tmp_path):
    datasets.disable_progress_bars()
    rows = {"text": [f"document {i}" for i in range(300)], "id": list(range(300))}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved")
    data = loaded(tmp_path / "saved")
    assert bytes(drawn(data, 0).flatten().tolist()).startswith(b"document 200\n\n")
    assert list(data.files) == ["data-00000-of-00001.arrow"]
    with pytest.raises(ValueError, match="no column body: name one of text, id"):
        loaded(tmp_path / "saved", column="body")
    with pytest.raises(ValueError, match=r"saved, row 1 has 0 in column id, must be text"):
        loaded(tmp_path / "saved", column="id")


def test_ranks_that_divide_a_stream_read_each_of_its_parts_forwards(source):
    """Three ranks, of which one is lost: the others read what they take over from its start, once."""
    ranks = [loaded(source) for _ in range(3)]
    opened = []
    for rank, data in enumerate(ranks):
        fresh = data.train._fresh
        data.train._fresh = lambda part, parts, rank=rank, fresh=fresh: (
            opened.append((rank, part)) or fresh(part, parts)
        )
    train = TrainConfig(3, steps=1, accumulate=2)
    for step in range(12):
        there = 3 if step < 4 else 2
        found = []
        for rank in range(there):
            share = partial(micro_batches, 18, 3, rank, there)
            session = SimpleNamespace(
                config=SimpleNamespace(train=train, seed=0),
                data=ranks[rank],
                world=SimpleNamespace(parts=3, share=lambda *_, share=share: share()),
            )
            found += [examples["input_ids"] for examples, _ in draws(session, step)]
        if step in (3, 4, 11):
            whole = loaded(source)
            turns = [(part, 2 * step + turn) for part in range(3) for turn in range(2)]
            each = [drawn(whole, at, part, 3) for part, at in turns]
            assert torch.equal(torch.cat(found), torch.cat(each))
    assert sorted(opened) == [(0, 0), (0, 1), (1, 1), (1, 2), (2, 2)]
