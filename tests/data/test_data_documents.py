"""Documents of one's own: files of rows, directories, saved sets, tokens; what cannot be read is refused."""

import csv
import errno
import json
import shutil

import pytest
import torch

import own
from detonation.data import load_dataset
from detonation.data.tokens import all_ids, document_encoder, load_tokenizer


def bytes_of(data):
    return bytes(data.train.ids.flatten().tolist())


def rows(count=40):
    return [{"id": i, "body": f"document {i} " * 8} for i in range(count)]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "detonation" / "tokens"


def test_rows_are_documents_and_their_syntax_is_not_trained_on(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows()))
    with (tmp_path / "b.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["id", "body"])
        table.writeheader()
        table.writerows(rows())
    texts = {
        name: bytes_of(
            load_dataset("text", {"source": str(tmp_path / name), "column": "body", "context": 16})
        )
        for name in ("a.jsonl", "b.csv")
    }
    assert texts["a.jsonl"] == texts["b.csv"] and texts["a.jsonl"].startswith(
        b"document 0 document 0"
    )
    assert b"{" not in texts["a.jsonl"] and b" \n\ndocument 1 " in texts["a.jsonl"]
    both = load_dataset("text", {"source": str(tmp_path), "column": "body", "context": 16})
    assert len(both.train.ids) > 1.9 * len(texts["a.jsonl"]) / 16


@pytest.mark.parametrize(
    ("task", "name", "line"),
    [
        ("text", "a.csv", '"document {0} of some words"'),
        ("text", "a.jsonl", '{{"text": "document {0} of some words"}}'),
        ("text", "a.txt", "document {0} of some words"),
        ("translation", "a.tsv", "text {0}\ttexte {0}"),
        ("translation", "a.jsonl", '{{"translation": {{"en": "text {0}", "fr": "texte {0}"}}}}'),
    ],
)
def test_the_mark_with_which_excel_and_windows_begin_a_file_is_no_part_of_it(
    tmp_path, task, name, line
):
    lines = [*["text"] * name.endswith(".csv"), *(line.format(n) for n in range(40))]
    found = []
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / name).write_text("\n".join(lines), encoding=encoding)
        batch = load_dataset(
            task, {"source": str(tmp_path / name), **({"context": 16} if task == "text" else {})}
        ).train
        found.append(batch[torch.arange(8)]["input_ids"])
    assert torch.equal(*found)


def test_parquet_and_directories_of_save_to_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    made = datasets.Dataset.from_list(rows())
    made.to_parquet(tmp_path / "a.parquet")
    made.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(tmp_path / "two")
    sources = [
        str(tmp_path / "a.parquet"),
        str(tmp_path / "one"),
        str(tmp_path / "two"),
        f"hf:{tmp_path / 'two'}",
    ]
    found = [
        load_dataset("text", {"source": source, "column": "body", "context": 16})
        for source in sources
    ]
    assert len({bytes_of(data) for data in found}) == 1 and [data.name for data in found] == [
        "a",
        "one",
        "two",
        "two",
    ]
    with pytest.raises(ValueError, match="no split trian: name one of train, test"):
        load_dataset("text", {"source": sources[2], "column": "body", "split": "trian"})
    with pytest.raises(ValueError, match="no column text: name one of id, body"):
        load_dataset("text", {"source": sources[1]})


@pytest.mark.parametrize(
    ("name", "content", "arguments", "message"),
    [
        (
            "a.json",
            "{}",
            {},
            r"a\.json cannot be read as text: give files of type \.csv, \.jsonl, \.md, \.parquet",
        ),
        ("a.pdf", "x", {}, r"a\.pdf cannot be read as text"),
        ("a.jsonl", '{"text": "x"}\n[1]\n', {}, r"a\.jsonl, line 2 is '\[1\]', but must be a JSON"),
        ("a.jsonl", '{"text": \n', {}, r"a\.jsonl, line 1 is not JSON"),
        (
            "a.jsonl",
            '{"body": "x"}\n',
            {},
            r"a\.jsonl, row 1 has no column text: name one of its columns, body",
        ),
        ("a.jsonl", '{"text": 0}\n', {}, r"a\.jsonl, row 1 has 0 in column text, must be text"),
        ("a.jsonl", '{"text": ["x"]}\n', {}, r"a\.jsonl, row 1 has \['x'\] in column text, must"),
        (
            "a.txt",
            "x",
            {"column": "text"},
            r"column is for files with rows, but .* holds plain text: leave column out",
        ),
        (
            "a.txt",
            "x",
            {"split": "train"},
            r"split does not apply to source .*a\.txt: leave it out",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(tmp_path, name, content, arguments, message):
    (tmp_path / name).write_text(content)
    for source in (tmp_path / name, tmp_path):
        if source == tmp_path and "split" in arguments:
            continue
        with pytest.raises(ValueError, match=message.replace(r".*a\.txt would", ".* would")):
            load_dataset("text", {"source": str(source), **arguments})


@pytest.mark.parametrize("task", ["text", "translation"])
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".tsv"])
def test_rows_that_are_not_utf_8_name_their_file_and_the_remedy(tmp_path, task, suffix):
    if (task, suffix) in (("text", ".tsv"), ("translation", ".csv")):
        return  # no suffix of texts, or of pairs
    file = tmp_path / f"latin{suffix}"
    file.write_bytes('{"text": "café", "translation": "café"}\tcoffee\n'.encode("latin-1") * 40)
    with pytest.raises(
        ValueError, match=r"latin\.\w+ is not UTF-8 \(byte 0xe9\): convert it, .*iconv"
    ) as caught:
        load_dataset(task, {"source": str(file)})
    assert type(caught.value) is ValueError and "\n" not in str(caught.value)


def test_half_a_character_of_json_names_its_file(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud800"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl has text that is not Unicode \(U\+D800\)"):
        load_dataset("text", {"source": str(tmp_path / "a.jsonl")})


@pytest.mark.parametrize("task", ["text", "translation"])
@pytest.mark.parametrize("damage", ["another file", "cut off", "bytes inside", "empty"])
def test_a_damaged_parquet_file_is_one_line_that_names_it(tmp_path, task, damage):
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    file, texts = tmp_path / "rows.parquet", [f"document {i}" for i in range(5000)]
    parquet.write_table(arrow.table({"text": texts, "translation": texts}), file)
    whole = file.read_bytes()
    middle = whole[:200] + bytes(255 - byte for byte in whole[200:4000]) + whole[4000:]
    file.write_bytes(
        {"another file": b"x" * 99, "cut off": whole[:999], "bytes inside": middle, "empty": b""}[
            damage
        ]
    )
    with pytest.raises(
        ValueError, match=r"rows\.parquet is no whole Parquet file: .*copy or download it again"
    ) as caught:
        load_dataset(task, {"source": str(file)})
    assert type(caught.value) is ValueError and "\n" not in str(caught.value)


def test_a_file_that_may_not_be_read_is_bad_input(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a text")

    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.read_bytes", refused)
    with pytest.raises(ValueError, match=r"a\.txt cannot be read: Permission denied"):
        load_dataset("text", {"source": str(tmp_path / "a.txt")})


def test_hidden_files_are_no_documents(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index.bin").write_bytes(b"x")
    (tmp_path / ".DS_Store").write_bytes(b"x")
    (tmp_path / "a.txt").write_text("ab" * 200)
    assert set(bytes_of(load_dataset("text", {"source": str(tmp_path), "context": 8}))) == set(
        b"ab"
    )


def test_linked_folders_are_read_and_a_link_that_leads_nowhere_is_named(tmp_path):
    for name in ("in", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "in" / "a.txt").write_text("a" * 200)
    (tmp_path / "elsewhere" / "b.txt").write_text("b" * 200)
    (tmp_path / "in" / "link").symlink_to(tmp_path / "elsewhere")
    source = {"source": str(tmp_path / "in"), "context": 8}
    assert set(b"ab") <= set(bytes_of(load_dataset("text", source)))
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "in")
    with pytest.raises(
        ValueError, match=r"link/back is a link to \S*in, which contains it: remove"
    ):
        load_dataset("text", source)
    (tmp_path / "elsewhere" / "back").unlink()
    (tmp_path / "in" / "c.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"in/c\.txt cannot be read: No such file or directory"):
        load_dataset("text", source)


def test_tokens_are_those_of_the_tokenizer_with_an_end_after_each_document(tmp_path, cache):
    source, words = own.json_lines(tmp_path / "a.jsonl"), own.tokenizer(tmp_path / "words")
    arguments = {"source": str(source), "tokenizer": str(words), "context": 8}
    data = load_dataset("text", arguments)
    made = load_tokenizer(str(words))
    assert data.model == {"vocab": len(made)} and (data.train.ids.dtype, data.name) == (
        torch.int32,
        "a",
    )
    texts = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    assert made.decode(data.train.ids.flatten()[:60].tolist()).startswith(
        f"{texts[0]}<end>{texts[1]}<end>"
    )
    assert (data.train.ids == made.eos_token_id).sum() > 40
    (kept,) = cache.glob("*.int32")
    kept.write_bytes(bytes(kept.stat().st_size))  # what lies there is used, not made again
    assert not load_dataset("text", arguments).train.ids.any()
    source.write_text(source.read_text() + '{"text": "more"}\n')
    assert load_dataset("text", arguments).train.ids.any() and len(list(cache.glob("*.int32"))) == 2


@pytest.mark.parametrize("task", ["text", "translation", "labels"])
def test_the_largest_id_of_a_tokenizer_with_a_gap_is_in_the_vocabulary(tmp_path, cache, task):
    words = own.tokenizer(tmp_path / "words")
    table = json.loads((words / "tokenizer.json").read_text())
    table["model"]["vocab"]["Ġdog"] = 600
    (words / "tokenizer.json").write_text(json.dumps(table))
    texts = [f"{i} dog" for i in range(40)]
    rows = [
        {"text": text, "translation": {"en": text, "xx": text}, "label": i % 2}
        for i, text in enumerate(texts)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    more = {"text": {"context": 4}, "labels": {"label": "label"}, "translation": {}}[task]
    arguments = {"source": str(tmp_path / "a.jsonl"), "tokenizer": str(words), **more}
    data = load_dataset({"labels": "text"}.get(task, task), arguments)
    assert data.train[torch.arange(4)]["input_ids"].max() == 600
    assert data.model["vocab"] == 601


def test_the_cache_tells_tokenizers_with_equal_vocabularies_apart(tmp_path, cache):
    words = own.tokenizer(tmp_path / "words")
    split = shutil.copytree(words, tmp_path / "split")
    settings = json.loads((split / "tokenizer_config.json").read_text())
    settings["split_special_tokens"] = True
    (split / "tokenizer_config.json").write_text(json.dumps(settings))
    slow = [slow_tokenizer(tmp_path / each[0], each) for each in ("a b", "b c</w>")]
    for text, pair in [(b"cat <end> dog", [words, split]), (b"abc", slow)]:
        found = [all_ids([text], str(each)).tolist() for each in pair]
        assert found == [list(document_encoder(str(each))(text)) for each in pair]
        assert found[0] != found[1]


def slow_tokenizer(folder, merges):
    """The directory of a tokenizer in plain Python, whose merges are not in its vocabulary."""
    folder.mkdir()
    pieces = ["<unk>", "a", "b", "c</w>", "a@@", "b@@", "c", "ab@@", "bc"]
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "CTRLTokenizer"}')
    return folder


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, cache):
    arguments = {
        "source": str(own.json_lines(tmp_path / "a.jsonl")),
        "tokenizer": str(own.tokenizer(tmp_path / "words")),
    }
    kept = load_dataset("text", {**arguments, "context": 8}).train.ids
    cache.rename(cache.with_name("gone"))
    cache.write_text("no directory")
    assert torch.equal(load_dataset("text", {**arguments, "context": 8}).train.ids, kept)


def test_a_full_disk_keeps_no_part_of_the_tokens(tmp_path, cache, monkeypatch):
    arguments = {
        "source": str(own.json_lines(tmp_path / "a.jsonl")),
        "tokenizer": str(own.tokenizer(tmp_path / "words")),
    }

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert len(load_dataset("text", {**arguments, "context": 8}).train) > 0
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_long_document_is_cut_at_ends_of_lines_and_loses_nothing(tmp_path, cache, monkeypatch):
    monkeypatch.setattr("detonation.data.tokens._PIECE", 50)
    (tmp_path / "a.txt").write_text(text := "\n".join("the cat sat on the log" for _ in range(60)))
    words = own.tokenizer(tmp_path / "words")
    data = load_dataset(
        "text", {"source": str(tmp_path / "a.txt"), "tokenizer": str(words), "context": 4}
    )
    ids = torch.cat([data.train.ids.flatten(), data.validation.ids.flatten()])
    assert sum(
        len(load_tokenizer(str(words)).decode(ids[i : i + 1])) for i in range(len(ids))
    ) > 0.95 * len(text)


def test_pairs_as_rows_and_as_tokens(tmp_path, cache):
    pairs = [{"translation": {"en": f"the cat {i}", "xx": f"the dog {i} sat"}} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    arguments = {"source": str(tmp_path / "a.jsonl"), "source_length": 20, "target_length": 20}
    plain = load_dataset("translation", arguments)
    drawn = plain.train[torch.tensor([1])]
    assert (
        bytes(drawn["input_ids"][0, :9].sub(3).tolist()) == b"the cat 1"
        and drawn["input_ids"][0, 9] == 1
    )
    words = own.tokenizer(tmp_path / "words")
    data = load_dataset("translation", {**arguments, "tokenizer": str(words)})
    made, drawn = load_tokenizer(str(words)), data.train[torch.tensor([1])]
    assert data.model == {"vocab": len(made)} and len(data.train) == len(plain.train) == 36
    real = drawn["attention_mask"].bool()
    assert made.decode(drawn["input_ids"][real]) == "the cat 1"
    assert (drawn["input_ids"][~real] == made.pad_token_id).all() and (
        drawn["labels"] == -100
    ).any()
    assert made.decode(drawn["labels"][drawn["labels"] >= 0]) == "the dog 1 sat"


def test_a_tokenizer_that_is_nowhere_is_one_line(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"data.tokenizer .*none cannot be loaded from a directory or from the hub",
    ) as raised:
        load_dataset("text", {"tokenizer": str(tmp_path / "none")})
    assert "\n" not in str(raised.value)


def test_a_text_of_a_csv_may_be_long(tmp_path):
    text = "word " * 50_000
    (tmp_path / "long.csv").write_text(f'text\n"{text}"\n')
    data = load_dataset("text", {"source": str(tmp_path / "long.csv"), "context": 16})
    assert len(data.train) > 10_000
