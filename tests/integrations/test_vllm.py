"""vLLM's own loader of sparse patches, from its wheel, behind a follower of weights.

It reads one file of a wheel of some hundred megabytes, and needs neither CUDA nor an installed
vLLM:

    make receivers
"""

import copy
import dataclasses
import importlib.util
import os
import sys
import zipfile

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import detonation as dt

WHEEL = os.environ.get("VLLM_WHEEL", "")
if not WHEEL:
    pytest.skip("VLLM_WHEEL names no wheel of vLLM", allow_module_level=True)
transformers = pytest.importorskip("transformers", reason="the extra models")
peft = pytest.importorskip("peft")

# peft asks transformers by an older name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

LOADER = "vllm/model_executor/model_loader/checkpoint_weight_patch.py"
UPDATES = 50
BF16 = torch.bfloat16
FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
"""As in vLLM's Llama."""


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """The module of the loader, unmodified."""
    path = tmp_path_factory.mktemp("vllm") / "loader.py"
    path.write_bytes(zipfile.ZipFile(WHEEL).read(LOADER))
    spec = importlib.util.spec_from_file_location("vllm_loader", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def as_dataclass(named_tuple):
    """The same class as a dataclass."""
    names = named_tuple._fields
    fields = [(name, object) for name in names if name not in named_tuple._field_defaults]
    fields += [
        (n, object, dataclasses.field(default=d)) for n, d in named_tuple._field_defaults.items()
    ]
    return dataclasses.make_dataclass(named_tuple.__name__, fields, frozen=True)


class Served(nn.Module):
    """The weights of a Llama as vLLM holds them: q, k and v are fused, gate and up, too."""

    def __init__(self, checkpoint):
        super().__init__()
        self.parts = {}
        wholes = {}
        for name, tensor in checkpoint.items():
            fused, part = self.fused(name)
            wholes.setdefault(fused, []).append((part, name, tensor))
        self.weights = nn.ParameterDict()
        for fused, pieces in wholes.items():
            first = 0
            for _, name, tensor in sorted(pieces, key=lambda piece: piece[0]):
                self.parts[name] = (fused.replace(".", "/"), first, len(tensor))
                first += len(tensor)
            whole = torch.cat(
                [tensor for _, _, tensor in sorted(pieces, key=lambda piece: piece[0])]
            )
            self.weights[fused.replace(".", "/")] = nn.Parameter(whole.clone())
        self.breaks_after = None

    @staticmethod
    def fused(name):
        for whole, parts in FUSED.items():
            for number, part in enumerate(parts):
                if f".{part}." in name:
                    return name.replace(part, whole), number
        return name, 0

    def part(self, name):
        fused, first, count = self.parts[name]
        return self.weights[fused].data.narrow(0, first, count)

    def load_weights(self, weights):
        loaded = set()
        for name, tensor in weights:
            if self.breaks_after is not None and self.breaks_after <= 0:
                raise RuntimeError("out of memory")
            self.part(name).copy_(tensor)
            loaded.add(name)
            if self.breaks_after is not None:
                self.breaks_after -= 1
        return loaded

    def differs(self, model):
        """Names of weights whose bits are not those of `model` in bf16."""
        state = {name: p.detach().to(BF16) for name, p in model.named_parameters()}
        assert state.keys() == self.parts.keys()
        return [name for name, new in state.items() if not same_bits(new, self.part(name))]


def same_bits(one, other):
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def llama(tied):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def with_adapter(model):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def merge(tuned, merged):
    """Writes the weights with the adapter merged into a plain model."""
    with torch.no_grad():
        for name, module in tuned.base_model.model.named_modules():
            if isinstance(module, peft.tuners.lora.Linear):
                whole = module.base_layer.weight + module.get_delta_weight("default")
                merged.get_submodule(name).weight.copy_(whole)


class Training:
    """A model that learns random text, and the plain model that is published."""

    def __init__(self, folder, tied, adapter=False):
        self.published = llama(tied)
        self.trained = self.published
        if adapter:
            self.trained = with_adapter(copy.deepcopy(self.published))
            merge(self.trained, self.published)
        weights = [p for p in self.trained.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(weights, lr=1e-4)
        self.feed = dt.Feed.of_weights(self.published, folder, dtype=BF16, base_every=20)
        self.steps = 0
        self.written = [self.feed.publish(0)]

    def step(self):
        torch.manual_seed(self.steps)
        tokens = torch.randint(256, (2, 16))
        self.trained(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.trained is not self.published:
            merge(self.trained, self.published)
        self.steps += 1
        self.written.append(self.feed.publish(self.steps))


def reader_of(training, folder):
    """A follower with weights of its own, and a server that started with the same weights."""
    model = llama(training.published.config.tie_word_embeddings).to(BF16)
    served = Served({name: p.detach() for name, p in model.named_parameters()})
    return dt.follow(model, folder, wait=False), served


CASES = {
    "untied": {"tied": False},
    "tied": {"tied": True},
    "merged adapter": {"tied": True, "adapter": True},
}


@pytest.mark.parametrize("form", ["as it is", "dataclass"])
@pytest.mark.parametrize("case", CASES)
def test_a_server_has_the_bits_of_the_trainer_after_each_of_50_updates(case, form, vllm, tmp_path):
    patch_class = vllm.CheckpointWeightPatch
    if form == "dataclass":
        patch_class = as_dataclass(patch_class)
    training = Training(tmp_path, **CASES[case])
    follower, served = reader_of(training, tmp_path)
    for _ in range(UPDATES):
        training.step()
        patches = [patch_class(**vars(patch)) for patch in follower.patches(to=training.steps)]
        loaded = vllm.load_checkpoint_weight_patches(served, patches)
        assert loaded == {patch.name for patch in patches}
        assert served.differs(training.published) == []
    dense = 2 * sum(p.numel() for p in training.published.parameters())
    sent = sum(training.written[1:]) / UPDATES
    print(f"\n{case}, {form}: {sent:,.0f} bytes per update, {dense:,} of all weights")


def test_after_a_failed_update_a_server_is_mixed_until_dense_patches_restore_it(vllm, tmp_path):
    training = Training(tmp_path, tied=True)
    follower, served = reader_of(training, tmp_path)
    training.step()
    served.breaks_after = 3
    patches = [vllm.CheckpointWeightPatch(**vars(patch)) for patch in follower.patches(to=1)]
    with pytest.raises(RuntimeError, match="out of memory"):
        vllm.load_checkpoint_weight_patches(served, patches, max_chunk_bytes=1)
    wrong = served.differs(training.published)
    assert 0 < len(wrong) < len(served.parts)  # a mixture of two steps
    served.breaks_after = None
    training.step()
    sparse = [vllm.CheckpointWeightPatch(**vars(patch)) for patch in follower.patches(to=2)]
    vllm.load_checkpoint_weight_patches(served, sparse)
    assert served.differs(training.published) != []  # later patches do not repair it
    dense = [
        vllm.CheckpointWeightPatch(name, tuple(p.shape), p.dtype, p.detach().flatten())
        for name, p in follower.model.named_parameters()
    ]
    vllm.load_checkpoint_weight_patches(served, dense)
    assert served.differs(training.published) == []


def test_a_weight_that_is_nan_is_refused_before_the_server_changes(vllm, tmp_path):
    training = Training(tmp_path, tied=True)
    follower, served = reader_of(training, tmp_path)
    vllm.load_checkpoint_weight_patches(
        served, [vllm.CheckpointWeightPatch(**vars(patch)) for patch in follower.patches(to=0)]
    )
    before = {name: served.part(name).clone() for name in served.parts}
    training.published.model.norm.weight.data[0] = torch.nan
    training.feed.publish(1)
    patches = [vllm.CheckpointWeightPatch(**vars(patch)) for patch in follower.patches(to=1)]
    with pytest.raises(ValueError, match="NaN"):
        vllm.load_checkpoint_weight_patches(served, patches)
    assert all(same_bits(served.part(name), old) for name, old in before.items())


def adapter_of(model):
    return nn.ParameterList(p for name, p in model.named_parameters() if "lora_" in name)


def test_an_adapter_alone_reaches_a_directory_that_servers_load(tmp_path):
    trained = with_adapter(llama(tied=True))
    optimizer = torch.optim.AdamW(adapter_of(trained).parameters(), lr=1e-4)
    feed = dt.Feed.of_weights(adapter_of(trained), tmp_path / "feed", dtype=BF16)
    feed.publish(0)
    served = with_adapter(llama(tied=True)).to(BF16)
    follower = dt.follow(adapter_of(served), tmp_path / "feed")
    sent = 0
    for step in range(1, UPDATES + 1):
        tokens = torch.randint(256, (2, 16))
        trained(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sent += feed.publish(step)
        assert follower.update(to=step) == step
    served.save_pretrained(tmp_path / "adapter")
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    expected = peft.get_peft_model_state_dict(trained)
    assert found.keys() == expected.keys()
    assert all(same_bits(found[name], expected[name].to(BF16)) for name in found)
    weights = sum(p.numel() for p in adapter_of(trained))
    print(
        f"\nadapter alone: {sent / UPDATES:,.0f} bytes per update, {2 * weights:,} of the adapter"
    )
