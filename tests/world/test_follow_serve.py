"""The example that serves text from weights in training."""

import json
import runpy
import threading
import urllib.request
from pathlib import Path

import torch

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.flat.tensors import digest
from detonation.models import build_model

TOKEN = b"a token for tests only"
EXAMPLE = Path(__file__).parents[2] / "examples" / "follow_serve.py"


def language_model():
    torch.manual_seed(0)
    return build_model("olmo2", {"hidden_size": 32, "layers": 1, "heads": 2, "feed_forward": 64})


def test_text_comes_from_the_step_that_training_is_at():
    assert len(EXAMPLE.read_text().splitlines()) <= 65
    model, served = language_model(), language_model().eval()
    optimizer = dt.replicate(
        torch.optim.AdamW(model.parameters()), model, LoopbackCommunicator(2), dt.demo()
    )
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=TOKEN)
    optimizer.record(feed)
    ids = torch.arange(32).view(1, 32)
    with dt.follow(served, feed.address, token=TOKEN, wait=False) as follower:

        def train():
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        while follower.step < 0:
            train()
            follower.update(wait_s=0.01)
        for _ in range(3):
            train()
        feed.close()
        with runpy.run_path(str(EXAMPLE))["server"](follower, 0) as server:
            threading.Thread(target=server.serve_forever).start()
            url, found = (
                f"http://127.0.0.1:{server.server_address[1]}/?prompt=The%20union",
                {"step": -1},
            )
            while found["step"] < optimizer.step_count:
                with urllib.request.urlopen(url) as answer:
                    found = json.loads(answer.read())
            server.shutdown()
    assert found["step"] == optimizer.step_count and found["text"].startswith("The union")
    assert digest(served.parameters()) == digest(model.parameters())
