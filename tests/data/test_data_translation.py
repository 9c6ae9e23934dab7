"""Sentence pairs as ByT5 ids."""

import json
import re

import pytest
import torch

from detonation.data import batch, load_dataset
from detonation.data.packages import locate


@pytest.fixture
def pairs(tmp_path):
    file = tmp_path / "pairs.tsv"
    file.write_text("".join(f"one {i}\tuno ñ {i}\n" for i in range(40)), "utf-8")
    return file


def text(ids):
    return bytes((ids[ids >= 3] - 3).tolist()).decode()


def test_ids_mask_and_labels(pairs):
    data = load_dataset(
        "translation", {"source": str(pairs), "source_length": 10, "target_length": 12}
    )
    assert (data.kind, data.name, data.model) == ("translation", "pairs", {"vocab": 384})
    drawn = data.train[torch.tensor([3, 0])]
    assert {name: tuple(value.shape) for name, value in drawn.items()} == {
        "input_ids": (2, 10), "attention_mask": (2, 10), "labels": (2, 12),
    }  # fmt: skip
    assert [text(row) for row in drawn["input_ids"]] == ["one 3", "one 0"]
    assert [text(row) for row in drawn["labels"]] == ["uno ñ 3", "uno ñ 0"]
    assert drawn["input_ids"][0].tolist() == [b + 3 for b in b"one 3"] + [1, 0, 0, 0, 0]
    assert drawn["attention_mask"][0].tolist() == [1] * 6 + [0] * 4
    assert drawn["labels"][0].tolist() == [b + 3 for b in "uno ñ 3".encode()] + [
        1,
        -100,
        -100,
        -100,
    ]


def test_every_tenth_pair_is_held_out(pairs):
    data = load_dataset("translation", {"source": str(pairs)})
    validation = {text(row) for row in data.validation[torch.arange(4)]["input_ids"]}
    train = {text(row) for row in data.train[torch.arange(36)]["input_ids"]}
    assert validation == {"one 9", "one 19", "one 29", "one 39"}
    assert len(train) == 36 and not train & validation


def test_a_pair_that_training_contains_is_not_held_out(pairs):
    lines = pairs.read_text("utf-8").splitlines(keepends=True)
    lines[29] = lines[0]
    pairs.write_text("".join(lines), "utf-8")
    data = load_dataset("translation", {"source": str(pairs)})
    assert [text(row) for row in data.validation[torch.arange(3)]["input_ids"]] == [
        "one 9",
        "one 19",
        "one 39",
    ]
    assert len(data.train) == 36 and len(data.validation) == 3


def test_long_pairs_are_left_out(pairs):
    data = load_dataset(
        "translation", {"source": str(pairs), "source_length": 6, "target_length": 9}
    )
    assert len(data.train) == 9  # "uno ñ 0" is 8 bytes, and the end makes 9
    assert text(data.train[torch.tensor([0])]["labels"][0]) == "uno ñ 0"
    with pytest.raises(
        ValueError, match="of which 0 and 0 fit source_length 3 and target_length 128"
    ):
        load_dataset("translation", {"source": str(pairs), "source_length": 3})


def test_the_bible():
    data = load_dataset(
        "translation", {"source": "bible-en-es", "source_length": 512, "target_length": 512}
    )
    assert 27_000 < len(data.train) < 28_000 and 3_000 < len(data.validation) < 3_110
    first = data.train[torch.tensor([0])]
    assert text(first["input_ids"][0]).startswith("In the beginning, God created")
    assert text(first["labels"][0]).startswith("EN el principio crió Dios")
    short = load_dataset("translation", {"source": "bible-en-es"})
    assert len(short.train) > 14_000
    drawn = batch(short.train, seed=0, step=0, part=0, parts=2, size=8)
    assert drawn["input_ids"].shape == (8, 128) and (drawn["labels"] == 1).sum() == 8


def test_footnotes_leave_a_space_behind():
    lines = (locate("bible-en-es") / "pairs.tsv").read_text("utf-8").splitlines()
    assert len(lines) == 31_077
    glued = [line for line in lines if re.search(r"[a-z][,.;:!?]?[A-Z]", line.split("\t")[0])]
    assert not glued


@pytest.mark.parametrize("line", ["one\n", "a\tb\tc\n"])
def test_a_line_must_have_two_columns(pairs, line):
    pairs.write_text("a\tb\n" + line)
    with pytest.raises(ValueError, match=r"pair 2 has \d columns, not 2"):
        load_dataset("translation", {"source": str(pairs)})


def test_the_first_row_of_objects_gives_the_order_of_the_languages(tmp_path):
    rows = [{"en": f"one {n}", "fr": f"un {n}"} for n in range(40)]
    turned = [
        {key: row[key] for key in (reversed(row) if n % 2 else row)} for n, row in enumerate(rows)
    ]
    found = []
    for name, written in ("in-order", rows), ("turned", turned):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"translation": row}) + "\n" for row in written))
        found.append(load_dataset("translation", {"source": str(path)}).train[torch.arange(4)])
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    path.write_text(
        "".join(
            json.dumps({"translation": row}) + "\n" for row in [*rows, {"en": "one", "de": "eins"}]
        )
    )
    with pytest.raises(
        ValueError,
        match=r"turned\.jsonl: pair 41 has the languages en, de, but the first pair has en, fr",
    ):
        load_dataset("translation", {"source": str(path)})


@pytest.mark.parametrize(
    "name", ["pairs.tsv", "pairs.jsonl", "pairs.csv", "pairs.parquet", "pairs"]
)
def test_a_directory_is_no_file_of_pairs(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(
        ValueError, match=r"pairs\S* is a directory: give one file of type \.tsv, \.jsonl"
    ):
        load_dataset("translation", {"source": str(tmp_path / name)})


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ({"en": 5, "fr": "x"}, r"a\.jsonl: pair 41 has 5 in column en, must be text"),
        ({"en": ["x"], "fr": "x"}, r"a\.jsonl: pair 41 has \['x'\] in column en, must be text"),
        (None, r"a\.jsonl: pair 41 is None, must be \{language: sentence\}"),
        ("one", r"a\.jsonl: pair 41 is one, must be \{language: sentence\}"),
        ({"en": None, "fr": "x"}, None),
    ],
)
def test_a_pair_that_is_none_is_named_and_half_a_pair_is_left_out(tmp_path, pair, message):
    rows = [*({"en": f"one {n}", "fr": f"un {n}"} for n in range(40)), pair]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"translation": row}) + "\n" for row in rows))
    if message is None:
        assert len(load_dataset("translation", {"source": str(file)}).train) == 36
        return
    with pytest.raises(ValueError, match=message):
        load_dataset("translation", {"source": str(file)})


def test_a_csv_holds_no_pairs(tmp_path):
    (tmp_path / "a.csv").write_text("translation\none\n")
    with pytest.raises(
        ValueError, match=r"as pairs: give a file of type \.tsv, \.jsonl, \.parquet$"
    ):
        load_dataset("translation", {"source": str(tmp_path / "a.csv")})


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="did you mean 'bible-en-es'"):
        load_dataset("translation", {"source": "bible-en-fr"})
    with pytest.raises(ValueError, match="column does not apply to source"):
        load_dataset("translation", {"column": "translation"})


def test_too_few_pairs_are_told_of(tmp_path):
    (tmp_path / "few.tsv").write_text("one\tuno\ntwo\tdos\n")
    with pytest.raises(ValueError, match=r"few\.tsv"):
        load_dataset("translation", {"source": str(tmp_path / "few.tsv")})
