"""BLEU of a run's translations: that of sacrebleu on the whole corpus, whatever the number of ranks."""

import pytest
import torch
from sacrebleu.metrics.bleu import BLEU

import worlds
from detonation.train.loop.checks import load_data
from detonation.train.loop.evaluate import greedy, translate
from detonation.train.loop.session import start_session

PAIRS = "\n".join(
    f"the {i} birds sing\tdie {i} Voegel singen in {i % 7} Baeumen" for i in range(80)
)
TABLES = {
    "model": {"name": "t5", "hidden_size": 16, "layers": 1, "heads": 2, "feed_forward": 32},
    "scheme": {"name": "full"},
}


@pytest.fixture
def small(tiny, tmp_path):
    (tmp_path / "pairs.tsv").write_text(PAIRS)
    data = {
        "task": "translation",
        "source": str(tmp_path / "pairs.tsv"),
        "source_length": 24,
        "target_length": 40,
    }

    def configured(*sets):
        return tiny("train.bleu_sentences=7", *sets, data=data, **TABLES)

    return configured


def parrot(session):
    """A model whose greedy translation is the reference without its first word."""
    references = load_data(session.config.data).validation[torch.arange(7)]

    class Parrot(torch.nn.Module):
        config = session.model.config

        def forward(self, input_ids, attention_mask, decoder_input_ids, past_key_values=0, **_):
            rows = [int((references["input_ids"] == ids).all(1).nonzero()[0]) for ids in input_ids]
            labels, at = references["labels"][rows][:, 4:], past_key_values
            wanted = (
                labels[:, at] if at < labels.shape[1] else torch.ones(len(rows), dtype=torch.int64)
            )
            scores = torch.nn.functional.one_hot(wanted.clamp(min=0), 384).float()
            output = {
                "logits": scores[:, None],
                "encoder_last_hidden_state": None,
                "past_key_values": at + 1,
            }
            return type("Output", (), output)

    return Parrot()


def scores(mesh, config):
    session = start_session(config, torch.device("cpu"))
    real = translate(session)["val_bleu"]
    object.__setattr__(session, "model", parrot(session))
    return real, translate(session)["val_bleu"]


def test_it_is_the_score_of_the_corpus_on_any_number_of_ranks(small):
    config = small("mesh.replicas=1", "mesh.shards=3", "train.batch_size=2")
    pairs = load_data(config.data).validation
    labels = pairs[torch.arange(7)]["labels"]
    references = [pairs.text([i for i in row if i >= 0]) for row in labels.tolist()]
    assert references[0] == PAIRS.splitlines()[9].split("\t")[1]
    whole = BLEU().corpus_score([line[4:] for line in references], [references]).score
    found = worlds.run(scores, 1, 3, config)
    assert 50 < whole < 100 and all(rank[1] == pytest.approx(whole) for rank in found)
    assert len({rank[0] for rank in found}) == 1 and 0 <= found[0][0] < whole


def greedy_by_whole_passes(mesh, config):
    session = start_session(config, torch.device("cpu"))
    for weight in session.model.parameters():  # so that ids differ from one position to the next
        getattr(weight, "to_local", lambda weight=weight: weight)().data.normal_()
    batch = session.data.validation[torch.arange(7)]
    model = session.model.eval()
    ids = torch.full_like(batch["labels"][:, :1], model.config.decoder_start_token_id)
    given = {key: batch[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        for _ in range(batch["labels"].shape[1]):
            ids = torch.cat(
                [ids, model(**given, decoder_input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)],
                1,
            )
        return ids[:, 1:].tolist(), greedy(session, batch).tolist()


def test_ids_are_those_of_whole_passes(small):
    ((whole, cached),) = worlds.run(
        greedy_by_whole_passes, 1, 1, small("mesh.replicas=1", "mesh.shards=1")
    )
    assert (
        cached == whole
        and len({tuple(row) for row in whole}) > 1
        and max(len(set(row)) for row in whole) > 3
    )


def test_it_is_in_the_summary_and_for_translations_alone(small, tiny):
    with pytest.raises(
        ValueError, match=r"train\.bleu_sentences is for translations, but the data .* are text"
    ):
        tiny("train.bleu_sentences=3")
    assert small().train.bleu_sentences == 7
