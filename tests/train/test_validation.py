"""A validation covers all held-out examples, and counts those with a prediction alone."""

from dataclasses import replace

import pytest
import torch

from detonation.cluster.network.simulated import simulate_replicas
from detonation.cluster.processes.signals import Stop
from detonation.train.loop.evaluate import translate, validate
from detonation.train.loop.fit import fit
from detonation.train.verbs.simulate import virtual

PAIRS = "\n".join(f"the {i} birds sing\tdie {i} Voegel singen" for i in range(80))
T5 = {"name": "t5", "hidden_size": 16, "layers": 1, "heads": 2, "feed_forward": 32}


class Bereft:
    """The world of a rank whose second replica of three is lost: the rows of the other two arrive."""

    size = 3

    def __init__(self, world):
        self._world = world
        self.rank = 2 * world.rank

    def __getattr__(self, name):
        return getattr(self._world, name)


def found(config, measure, world):
    def act(communicator):
        session = virtual(config, communicator)
        return measure(replace(session, world=world(session.world)))

    return simulate_replicas(act, 2)


def test_what_a_lost_replica_would_have_validated_is_validated_by_the_others(tiny):
    config = tiny("train.validation_batches=7")
    whole, lost = (found(config, validate, world) for world in (lambda world: world, Bereft))
    assert lost[0] == lost[1] == pytest.approx(whole[0], rel=1e-12)


def test_what_a_lost_replica_would_have_translated_is_translated_by_the_others(tiny, tmp_path):
    (tmp_path / "pairs.tsv").write_text(PAIRS)
    data = {
        "task": "translation",
        "source": str(tmp_path / "pairs.tsv"),
        "source_length": 24,
        "target_length": 24,
    }
    config = tiny("train.bleu_sentences=7", "train.batch_size=1", data=data, model=T5)
    seen = []

    def counted(session):
        session.data.validation.text = lambda ids: seen.append(ids) or "one of these sentences"
        return translate(session)

    whole, lost = (found(config, counted, world) for world in (lambda world: world, Bereft))
    assert whole[0] == lost[0] == lost[1]
    # 7 translations and references each time, and first 5 of the parts of two replicas in vain
    assert len(seen) == 14 + 14 + 10


class Masked:
    """Held-out examples, of which some have no prediction."""

    def __init__(self, examples, has_predictions):
        self._examples, self._has = examples, has_predictions

    def __len__(self):
        return len(self._examples)

    def __getitem__(self, indices):
        batch = self._examples[indices]
        batch["labels"][[not self._has(int(i)) for i in indices]] = -100
        return batch


def masked(session, has_predictions):
    data = replace(session.data, validation=Masked(session.data.validation, has_predictions))
    return replace(session, data=data)


def test_a_batch_without_a_prediction_counts_for_nothing(tiny):
    config = tiny("train.batch_size=1", "train.validation_batches=16")

    def measure(session):
        examples = session.data.validation
        counted = [len(examples) * n // 16 for n in (1, 7)]
        session.model.eval()
        losses = [session.model(**examples[torch.tensor([i])]).loss.item() for i in counted]
        return validate(masked(session, lambda i: i in counted))["val_loss"], sum(losses) / 2

    for loss, wanted in found(config, measure, lambda world: world):
        assert loss == pytest.approx(wanted)


def test_a_validation_without_any_prediction_is_refused_before_the_first_step(tiny):
    def measure(session):
        records = []
        with pytest.raises(ValueError, match="no validation example has a prediction"):
            fit(masked(session, lambda i: False), 0, 2, records.append, Stop())
        return records

    assert found(tiny(), measure, lambda world: world) == [[], []]
