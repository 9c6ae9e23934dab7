"""Text from weights in training: a web server that follows a run, and continues a prompt with its newest weights.

DETONATION_TOKEN=... detonation train quick-lm --publish 127.0.0.1:7000
DETONATION_TOKEN=... python examples/follow_serve.py 127.0.0.1:7000
curl 'http://127.0.0.1:8000/?prompt=The%20state%20of%20the%20union'
"""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch

import detonation as dt
from detonation.feed.follower import Follower
from detonation.feed.stream import read_about
from detonation.feed.token import read_token
from detonation.models import build_model


def text(model: Any, prompt: str, length: int = 80) -> str:
    """`prompt` and what the model makes of it; quick-lm reads and writes bytes."""
    ids = torch.tensor([list(prompt.encode()[-64:] or b" ")])
    made = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=True
    )
    return bytes(byte for byte in made[0].tolist() if byte < 256).decode(errors="replace")


def server(follower: Follower, port: int) -> ThreadingHTTPServer:
    """Answers GET /?prompt=TEXT with the step of training and the text, on loopback."""
    using = threading.Lock()  # the model changes within `update` alone

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            prompt = parse_qs(urlsplit(self.path).query).get("prompt", [""])[0]
            with using, torch.no_grad():
                follower.update()
                answer = json.dumps(
                    {"step": follower.step, "text": text(follower.model, prompt)}
                ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(answer)

    def keep_up() -> None:
        while not follower.ended:
            with using:
                follower.update()
            time.sleep(0.05)

    threading.Thread(target=keep_up, daemon=True).start()
    return ThreadingHTTPServer(("127.0.0.1", port), Answer)


if __name__ == "__main__":
    config = read_about(sys.argv[1], read_token())["config"]["model"]
    made = build_model(config.pop("name"), config)
    server(dt.follow(made.eval(), sys.argv[1]), port=8000).serve_forever()
