"""Groups with learning rates of their own: the schedule moves each in its own proportion."""

from pathlib import Path

import pytest
import torch
from benchmarks.size_law import optimizers as size_law

from detonation.cluster.network.simulated import simulate_replicas
from detonation.cluster.processes.signals import Stop
from detonation.models import build_model
from detonation.train.loop.fit import fit
from detonation.train.recipe.optimizers import build_optimizer
from detonation.train.recipe.schema import OptimizerConfig
from detonation.train.verbs.simulate import Simulation, configured, virtual

NAME = f"{__name__}:two_rates"
TINY = (
    "data.source=sotu-sample data.context=16 model.hidden_size=16 model.layers=1 model.heads=2 "
    "model.feed_forward=16 train.steps=5 schedule.warmup=1 scheme.name=full"
)


def two_rates(params, lr):
    (group,) = params
    first, *rest = group["params"]
    return torch.optim.SGD([{"params": [first], "lr": 3 * lr}, {"params": rest}], lr=lr)


def rates(sets, done=0):
    """The learning rates of a run's groups at step `done`, and at its last step."""
    config = configured(Simulation(Path("recipes/quick-lm.toml"), tuple(sets.split()), 1, 4))

    def act(communicator):
        session = virtual(config, communicator)
        found = list[list[float]]()
        for until in (done, config.train.steps - 1):
            fit(session, done, until, lambda record: None, Stop())
            found.append([group["lr"] for group in session.base.param_groups])
        return found

    return simulate_replicas(act, 1)[0]


def test_the_schedule_keeps_the_ratio_of_groups():
    first, last = rates(f"{TINY} schedule.floor=0.1 optimizer.name={NAME} optimizer.lr=0.1")
    assert first == pytest.approx([0.3, 0.1])
    assert last == pytest.approx([0.03, 0.01])


def test_groups_of_one_rate_are_as_they_were():
    made = build_optimizer(OptimizerConfig("AdamW", 0.1), torch.nn.Linear(2, 2))
    assert [group["lr"] for group in made.param_groups] == [0.1]
    assert not any("lr_ratio" in group for group in made.param_groups)


def test_a_resumed_run_keeps_the_ratio():
    first, _ = rates(f"{TINY} schedule.floor=0.5 optimizer.name={NAME} optimizer.lr=0.1", done=4)
    assert first == pytest.approx([0.15, 0.05])


@pytest.mark.parametrize("name", ["AdamW", "SignSGD", "Muon"])
def test_embeddings_output_layer_and_norms_have_the_rate_of_the_recipe(name):
    """As the optimizers of benchmarks/size_law, from whose runs `plan` takes losses."""
    sizes = {"vocab": 16, "hidden_size": 16, "layers": 1, "heads": 2, "feed_forward": 16}
    model = build_model("olmo2", sizes)
    made = build_optimizer(OptimizerConfig(name, 0.1, embedding_lr_ratio=30), model)
    measured = getattr(size_law, name.lower())([{"params": list(model.parameters())}], 0.1, 30)
    assert rate_of_each(made) == rate_of_each(measured)
    assert sorted(group["lr"] for group in made.param_groups) == [0.1, pytest.approx(3.0)]
    assert [group.get("orthogonal") for group in made.param_groups] == [
        None if name != "Muon" else True,
        None if name != "Muon" else False,
    ]


def rate_of_each(optimizer):
    return {
        id(parameter): group["lr"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def test_a_model_without_embeddings_has_a_rate_for_its_biases():
    made = build_optimizer(OptimizerConfig("SGD", 0.1, embedding_lr_ratio=3), torch.nn.Linear(2, 2))
    assert [group["lr"] for group in made.param_groups] == [0.1, pytest.approx(0.3)]


@pytest.mark.parametrize("ratio", [0, -1, float("inf"), float("nan")])
def test_a_ratio_that_is_no_factor_is_refused(ratio):
    with pytest.raises(
        ValueError, match=r"embedding_lr_ratio is .*, but must be a finite number above 0"
    ):
        OptimizerConfig("AdamW", 0.1, embedding_lr_ratio=ratio)
