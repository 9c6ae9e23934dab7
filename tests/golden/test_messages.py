"""Encoded messages, committed: another version of the code must say the same bytes, or say why not in the changelog.

Made by `python tests/golden/test_messages.py`.
"""

import json
from pathlib import Path

import pytest
import torch

import detonation as dt

GOLDEN = Path(__file__).with_name("messages.json")
SCHEMES = {
    "demo": dt.demo(topk=2, chunk=16),
    "random": dt.schemes.random(rate=1 / 16),
    "striding": dt.schemes.striding(rate=1 / 16),
    "full": dt.full(precision="bf16"),
    "demo-2bit": dt.demo(topk=9, chunk=16, precision="2bit"),
    "random-sign": dt.random_sign(rate=1 / 4),
    "demo-tiles": dt.demo(topk=5, chunk=4, tiles=True),
}


def message(scheme: dt.schemes.Scheme) -> dict[str, list]:
    """What is told of a small ramp at step 5: values rounded to what every CPU agrees on, and the columns."""
    layout = scheme.codec.layout({"w": (5, 9), "b": (3,)})
    ramp = [torch.arange(45.0).view(5, 9).sub(20), torch.tensor([0.5, -8.0, 3.0])]
    flat = layout.flatten(ramp, torch.device("cpu"))
    selected = scheme.codec.select(flat, step=5, seed=1)
    sent = scheme.codec.encode(selected)
    parts = torch.split(sent.unsqueeze(0), list(scheme.codec.lengths[layout.rows]), 1)
    values = scheme.codec.values(parts, layout.rows)[0]
    indices = (
        torch.zeros_like(values, dtype=torch.long) if selected.indices is None else selected.indices
    )
    order = indices.argsort(1)
    rounded = [[round(value, 3) for value in row] for row in values.gather(1, order).tolist()]
    return {
        "values": rounded,
        "columns": indices.gather(1, order).tolist(),
        "bytes": scheme.codec.nbytes(layout.rows),
    }


@pytest.mark.parametrize("name, scheme", SCHEMES.items(), ids=SCHEMES)
def test_the_message_is_the_committed_one(name, scheme):
    golden, now = json.loads(GOLDEN.read_text())[name], message(scheme)
    assert (now["columns"], now["bytes"]) == (golden["columns"], golden["bytes"])
    torch.testing.assert_close(
        torch.tensor(now["values"]), torch.tensor(golden["values"]), atol=2e-3, rtol=0
    )


if __name__ == "__main__":
    GOLDEN.write_text(
        json.dumps({name: message(scheme) for name, scheme in SCHEMES.items()}) + "\n"
    )


HAD_A_DELAY = {
    "loco": ("precision", "decay", "delay", "link"),
    "striding": (
        *("rate", "decay", "alpha", "precision", "error_feedback"),
        *("aggregate", "delay", "link"),
    ),
    "random_sign": ("rate", "decay", "alpha", "error_feedback", "cycle", "delay", "link"),
}


@pytest.mark.parametrize("name", HAD_A_DELAY)
def test_messages_and_files_name_a_scheme_as_builds_did_whose_gradients_could_be_late(name):
    """The digest of these names, in this order, is in the header of each message."""
    made = dt.scheme(name, {"delay": 0})
    assert tuple(made.identity) == HAD_A_DELAY[name]
    assert made.identity == {**made.arguments, "delay": 0} and made == dt.scheme(name)
    with pytest.raises(ValueError, match=f"{name} has no delay any more"):
        dt.scheme(name, {"delay": 1})
    with pytest.raises(ValueError, match=f"{name} has no delay any more"):
        getattr(dt.schemes, name)(delay=1)
    assert getattr(dt.schemes, name)(delay=0) == dt.scheme(name)
