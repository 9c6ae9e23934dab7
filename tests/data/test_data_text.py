"""Text as bytes: the shipped sample, fetched sets, and text files."""

import pytest
import torch

from detonation.data import batch, load_dataset
from detonation.data.packages import locate
from detonation.data.text import PIECE, TEXT_SAMPLE, hold_out


def decoded(rows):
    return bytes(rows.flatten().tolist())


def test_the_sample_is_every_tenth_address_of_the_corpus():
    corpus = (locate("sotu") / "text.txt").read_bytes()
    speeches = corpus.decode().strip().split("\n\n")
    assert len(speeches) == 233
    assert TEXT_SAMPLE.read_text() == "\n\n".join(speeches[::10]) + "\n"
    assert 900_000 < TEXT_SAMPLE.stat().st_size < 1_000_000


def test_a_batch_of_the_sample():
    data = load_dataset("text", {"source": "sotu-sample", "context": 64})
    assert (data.name, data.kind, data.model) == ("sotu-sample", "text", {"vocab": 256})
    drawn = batch(data.train, seed=0, step=3, part=1, parts=2, size=4)
    assert drawn["input_ids"].shape == (4, 64) and drawn["input_ids"].dtype == torch.int64
    assert torch.equal(drawn["input_ids"], drawn["labels"])
    corpus = TEXT_SAMPLE.read_bytes()
    assert all(decoded(row) in corpus for row in drawn["input_ids"])


@pytest.mark.parametrize("context", [32, 100, 128])
def test_nothing_held_out_is_trained_on_and_nothing_is_lost(context):
    data = load_dataset("text", {"context": context})
    train, held_out = hold_out(
        torch.frombuffer(bytearray(TEXT_SAMPLE.read_bytes()), dtype=torch.uint8)
    )
    assert len(train) + len(held_out) == TEXT_SAMPLE.stat().st_size
    assert 0.09 < len(held_out) / TEXT_SAMPLE.stat().st_size < 0.11
    assert decoded(data.validation.ids) in decoded(held_out)
    assert decoded(data.train.ids) in decoded(train)
    # Held-out pieces are long enough to be nowhere in the train text by chance.
    pieces = held_out[: len(held_out) // PIECE * PIECE].view(-1, PIECE)
    assert all(decoded(piece) not in decoded(train) for piece in pieces)


def test_a_directory_of_text_files(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("a" * 300)
    (tmp_path / "deep" / "b.txt").write_text("b" * 300)
    (tmp_path / "c.md").write_text("c" * 300)
    data = load_dataset("text", {"source": str(tmp_path), "context": 8})
    assert set(decoded(data.train.ids)) <= set(b"abc\n")
    assert data.name == tmp_path.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context": 1}, "context must be at least 2 ids, not 1"),
        ({"context": 95_000}, "sotu-sample has 90112 bytes to hold out"),
        (
            {"context": 200_000},
            "sotu-sample has 954920 bytes; context 200000 needs at least 2000000",
        ),
        ({"source": ""}, "unknown source ''"),
        ({"source": "sotus"}, "unknown source 'sotus', did you mean 'sotu'"),
        ({"split": "train"}, "split does not apply to source sotu-sample: leave it out"),
        ({"contxt": 8}, "did you mean 'context'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_dataset("text", arguments)


def test_empty_text_is_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"has 0 bytes; context 128 needs at least 1280"):
        load_dataset("text", {"source": str(tmp_path / "empty.txt")})
    with pytest.raises(
        ValueError,
        match=r"holds no text files: add some \(\.csv, \.jsonl, \.md, \.parquet, \.text, \.txt\)",
    ):
        (tmp_path / "none").mkdir()
        load_dataset("text", {"source": str(tmp_path / "none")})


def test_an_unknown_task_is_refused():
    with pytest.raises(ValueError, match="unknown data 'txt', did you mean 'text'"):
        load_dataset("txt", {})
