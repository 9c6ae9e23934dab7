"""Fragments are equally large and the same on every shard, each has its turn, and buckets change no bit of a round."""

from functools import cache

import pytest
import torch
import transformers as hf

import detonation as dt
from covering import covered
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.flat.layout import Layout
from detonation.core.round import Round
from detonation.core.schemes import GradientScheme, buckets
from detonation.core.schemes.traffic import bytes_sent
from detonation.train.loop.checks import local_shapes
from zoo import SCHEMES

LLAMA = {
    "vocab_size": 32000,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
}
OLMO = {
    "vocab_size": 100352,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
}
MODELS = {
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config()),
    "tinyllama": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(hidden_size=2048, num_attention_heads=32, **LLAMA)
    ),
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(hidden_size=2048, **OLMO)),
}


@cache
def model(name: str) -> hf.PreTrainedModel:
    with torch.device("meta"):
        return MODELS[name]()


def divided(name, count, unit, shard=0, shards=1):
    sizes = {name: p.numel() for name, p in model(name).named_parameters()}
    layout = Layout.of(local_shapes(model(name), shard, shards), chunk=64)
    return sizes, layout.fragments(count, unit, sizes)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_no_fragment_exceeds_the_mean_by_more_than_the_largest_parameter(name, count):
    sizes, fragments = divided(name, count, "parameter")
    loads = [fragment.numel for fragment in fragments]
    assert sum(loads) == sum(sizes.values()) and sorted(
        s.name for f in fragments for s in f.slots
    ) == sorted(sizes)
    mean, largest = sum(loads) / count, max(sizes.values())
    assert max(loads) <= mean + largest
    assert max(loads) <= max(
        1.01 * mean, largest
    )  # what these models allow: even, but for an embedding


@pytest.mark.parametrize(
    ("name", "count", "most"), [("gpt2", 2, 1.03), ("tinyllama", 4, 1.07), ("olmo2", 4, 1.09)]
)
def test_blocks_stay_together(name, count, most):
    _, fragments = divided(name, count, "block")
    loads = [fragment.numel for fragment in fragments]
    assert max(loads) <= most * sum(loads) / count
    where = {}
    for number, fragment in enumerate(fragments):
        for slot in fragment.slots:
            for block in (int(part) for part in slot.name.split(".") if part.isdecimal()):
                where.setdefault(block, set()).add(number)
    assert where and all(len(found) == 1 for found in where.values())


@pytest.mark.parametrize("count", [2, 3, 5])
def test_equal_layers_take_turns(count):
    shapes = {f"layers.{block}.{kind}": (64, 8) for block in range(12) for kind in ("up", "down")}
    fragments = Layout.of(shapes, chunk=64).fragments(count, "block")
    assert [f.slots[0].name.split(".")[1] for f in fragments] == [str(f) for f in range(count)]
    for number, fragment in enumerate(fragments):
        assert {int(slot.name.split(".")[1]) % count for slot in fragment.slots} == {number}


@pytest.mark.parametrize("unit", ["parameter", "block"])
def test_every_shard_divides_alike(unit):
    found = [divided("gpt2", 3, unit, shard, 7)[1] for shard in range(7)]
    assert (
        len(
            {
                tuple(tuple(slot.name for slot in fragment.slots) for fragment in each)
                for each in found
            }
        )
        == 1
    )


def test_the_names_of_units_are_checked_and_more_fragments_than_units_are_empty():
    layout = Layout.of({"0.weight": (8, 8), "0.bias": (8,)}, chunk=4)
    assert [fragment.rows for fragment in layout.fragments(3, "block")] == [18, 0, 0]
    with pytest.raises(ValueError, match="unit is 'layer', must be one of parameter, block"):
        dt.schemes.streaming_diloco(unit="layer")


@pytest.mark.parametrize("every", [1, 4, 7, 100])
@pytest.mark.parametrize("fragments", [1, 3, 4, 7])
@pytest.mark.parametrize("delay", [0, 1, 3, 6])
def test_fragments_land_as_in_torchft(every, fragments, delay):
    """Fragment f (from 1) lands when f / fragments of a round are over and leaves `delay` steps before."""
    if fragments > every or delay >= every:
        with pytest.raises(ValueError, match="must be"):
            dt.schemes.streaming_diloco(every=every, fragments=fragments, delay=delay)
        return
    scheme = dt.schemes.streaming_diloco(every=every, fragments=fragments, delay=delay)
    for turn, round in enumerate(scheme.rounds, 1):
        lands = [step for step in range(4 * every) if round.sends(step - delay)]
        first = turn * every // fragments - 1
        assert lands == list(range(first if first >= delay else first + every, 4 * every, every))


def test_a_message_with_a_whole_round_leaves_at_its_end():
    assert [step for step in range(9) if Round(every=3, delay=3).sends(step)] == [2, 5, 8]


@pytest.mark.parametrize("round", [Round(every=2), Round(delay=1)])
def test_a_scheme_that_exchanges_gradients_has_no_rounds(round):
    with pytest.raises(ValueError, match="gradients are exchanged and used at every step"):
        GradientScheme(round=round)


@pytest.mark.parametrize("keep", [-0.1, 1.1])
def test_keep_is_a_share(keep):
    with pytest.raises(ValueError, match="must be from 0 to 1"):
        dt.schemes.streaming_diloco(keep=keep)
    assert dt.schemes.streaming_diloco(keep=1.0).keep == 1


ROUNDS = {name: scheme for name, scheme in SCHEMES.items() if scheme.signal == "parameters"} | {
    "streaming-late": dt.schemes.streaming_diloco(every=6, fragments=2, delay=3, keep=0.25),
}
SHAPES = [(600, 140), (140,), (300, 280), (1,)]
STEPS = 9


def trained(scheme, replicas, spoiled=False, transposed=True):
    """Weights and private state of each of `replicas` after an open round and settled, and the bytes of each step.

    spoiled: the last matrix of replica 1 is not finite in the end of each round.
    transposed: the last matrix is not contiguous.
    """

    def act(communicator):
        generator = torch.Generator().manual_seed(communicator.replica)
        model = torch.nn.ParameterList([torch.ones(shape) for shape in SHAPES])
        model[2].data = torch.ones(280, 300).T if transposed else model[2].data
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = dt.replicate(
            sgd, model, communicator, scheme, safety=dt.Safety(non_finite="skip")
        )
        sent = []
        for step in range(STEPS):
            for parameter in model:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            if spoiled and communicator.replica == 1 and step == scheme.round.every - 1:
                model[2].grad[0, 0] = torch.inf
            before = optimizer.stats.bytes_sent
            optimizer.step()
            sent.append(optimizer.stats.bytes_sent - before)
        kept = [
            tensor for name, tensor in optimizer.local_state().items() if "usual_norm" not in name
        ]  # of a bucket
        state = [tensor.clone() for tensor in (*model.parameters(), *kept)]
        optimizer.synchronize()
        return (
            [*state, *(parameter.detach().clone() for parameter in model)],
            sent,
            len(optimizer.build()[0].channel.pipelines),
        )

    return simulate_replicas(act, replicas)


@pytest.mark.parametrize("name", ROUNDS)
def test_a_parameter_that_is_not_contiguous_is_trained_alike(name):
    for one, other in zip(
        trained(ROUNDS[name], 2), trained(ROUNDS[name], 2, transposed=False), strict=True
    ):
        assert one[1] == other[1]
        assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


@covered("name, replicas", ROUNDS, [2, 3])
def test_buckets_change_no_bit_of_a_round(name, replicas, monkeypatch):
    whole = trained(ROUNDS[name], replicas)
    monkeypatch.setattr(buckets, "SMALLEST", 2**13)
    cut = trained(ROUNDS[name], replicas)
    layout = ROUNDS[name].codec.layout({str(number): shape for number, shape in enumerate(SHAPES)})
    for one, other in zip(whole, cut, strict=True):
        assert one[2] == 1 and (other[2] > 2 or not ROUNDS[name].summable)
        assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
        if not ROUNDS[name].round.delay or replicas == 2:  # owners send again when a message lands
            assert other[1] == [
                bytes_sent(ROUNDS[name], layout, replicas, step) for step in range(STEPS)
            ]


@pytest.mark.parametrize("name", ["diloco", "streaming", "sparta", "muloco"])
def test_a_bucket_that_is_not_finite_goes_to_its_anchor(name, monkeypatch):
    monkeypatch.setattr(buckets, "SMALLEST", 2**13)
    for state, _, count in trained(ROUNDS[name], 2, spoiled=True):
        assert count > 2 and all(tensor.isfinite().all() for tensor in state[-len(SHAPES) :])
