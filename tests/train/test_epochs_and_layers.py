"""Lengths in epochs, rates that fall in steps, and layers that are compiled or computed again in backward."""

import pytest
import tomli_w
import torch

from detonation.train.loop.checks import check_config, checkpoint_activations, load_data
from detonation.train.loop.session import seeded_model
from detonation.train.output import directory
from detonation.train.recipe.optimizers import lr_factor
from detonation.train.recipe.resolve import Request
from detonation.train.recipe.schema import ScheduleConfig
from detonation.train.recipe.tables import from_table, to_table
from detonation.train.run.start import _length, _with_length, make_task


def test_epochs_become_the_steps_that_they_take(tiny):
    config = tiny("train.steps=0", "train.epochs=0.5", "train.accumulate=2")
    examples = len(load_data(config.data).train)
    assert config.train.steps == -(-examples // 2 // (4 * 2 * 2))
    assert check_config(from_table(to_table(config))) == config, "a run that is resumed has as many"
    assert tiny("train.epochs=0.5").train.steps == 6, "steps are asked for, and win"


def test_a_resumed_run_has_the_epochs_of_its_recipe(tiny_recipe, tmp_path):
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(tiny_recipe))
    in_epochs = ("train.steps=0", "train.epochs=0.5")

    def started(*sets, resume=True):
        request = Request(tmp_path / "tiny.toml", sets, out=tmp_path / "run", resume=resume)
        config = make_task(_with_length(request, _length(request, None)), None).config
        directory.begin_run(tmp_path / "run", to_table(config))
        return config.train.steps

    (tmp_path / "run").mkdir()
    steps = started(*in_epochs, resume=False)
    assert started(*in_epochs, "mesh.replicas=4") == steps, "other ranks"
    assert started(*in_epochs, "train.steps=6") == 6
    assert started(*in_epochs) == steps, "--steps counts where it is given"
    assert started(*in_epochs, "train.batch_size=8") == -(-steps // 2)
    assert started(*in_epochs, "train.accumulate=2") == -(-steps // 2)


def test_a_run_needs_a_length(tiny, tmp_path):
    documents = tmp_path / "documents.jsonl"
    documents.write_text(300 * '{"text": "The stream has no end."}\n')
    with pytest.raises(
        ValueError, match=r"train\.steps is 0, but must be at least 1, or train\.epochs above 0"
    ):
        tiny("train.steps=0")
    with pytest.raises(ValueError, match=r"train\.epochs needs data of known length, not a stream"):
        tiny("train.steps=0", "train.epochs=1", f"data.source={documents}", "data.streaming=true")


def test_a_rate_falls_at_each_milestone():
    factor = lr_factor(ScheduleConfig("step", warmup=2, milestones=(0.5, 0.8), gamma=0.1), 10)
    assert [factor(step) for step in range(10)] == pytest.approx(
        [0.5] + 4 * [1] + 3 * [0.1] + 2 * [0.01]
    )


@pytest.mark.parametrize("milestones", ["[0.8,0.5]", "[0.0]", "[1.0]", "[0.5,0.5]"])
def test_milestones_rise_within_the_run(tiny, milestones):
    with pytest.raises(ValueError, match=r"schedule\.milestones is .* but must be rising numbers"):
        tiny("schedule.name=step", f"schedule.milestones={milestones}")


def gradients(config):
    """The gradients of one batch, and the tensors that its forward keeps for backward."""
    model, kept = seeded_model(config), []
    batch = load_data(config.data).train[torch.arange(4)]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t
    ):
        loss = model(**batch).loss
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, sum(kept)


@pytest.mark.long  # no branch of its own
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at it
def test_layers_that_are_computed_again_or_compiled_have_the_same_gradients(tiny):
    plain, kept = gradients(tiny())
    again, less = gradients(tiny("train.checkpoint_activations=true"))
    both, _ = gradients(tiny("train.checkpoint_activations=true", "train.compile=eager"))
    assert less < 0.7 * kept
    for name, gradient in plain.items():
        assert torch.equal(gradient, again[name]) and torch.equal(gradient, both[name]), name


@pytest.mark.long  # no branch of its own
def test_a_run_of_such_layers_is_the_run_without(train):
    plain = train("plain", "train.steps=2", "mesh.shards=2")[0]
    again = train("again", "train.steps=2", "mesh.shards=2", "train.checkpoint_activations=true")[0]
    assert again["fingerprint"] == plain["fingerprint"]


def test_what_cannot_be_compiled_is_said_before_any_process_starts(tiny):
    with pytest.raises(
        ValueError, match=r"train\.compile is 'inductr', but must be one of .*inductor"
    ):
        tiny("train.compile=inductr")
    with pytest.raises(ValueError, match=r"works on layers .*, but the model has none"):
        checkpoint_activations(torch.nn.Linear(2, 2))
