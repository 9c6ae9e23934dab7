"""Run directories for reports, written from a formula instead of by training."""

import json
import math

import tomli_w

FULL = 4_000_000


def made(path, scheme="demo", steps=40, sent=120_000, levels=(), **summary):
    """Writes the run of a `scheme` that sends `sent` bytes per step; `levels`: (axis, bytes per step) of each level."""
    path.mkdir(parents=True)
    records = [record(step, sent, steps) for step in range(1, steps + 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    (path / "config.toml").write_text(
        tomli_w.dumps({"seed": 0, "scheme": {"name": scheme}, "train": {"steps": steps}})
    )
    (path / "environment.json").write_text(
        json.dumps({"packages": {"torch": "2.13.0"}, "platform": "Linux", "gpus": []})
    )
    defaults = {
        "scheme": scheme,
        "scheme_arguments": {},
        "optimizer": "AdamW",
        "replicas": 2,
        "shards": 1,
        "model": "olmo2",
        "data": "sotu-sample",
        "num_parameters": 1_000_000,
        "steps": steps,
        "train_loss": records[-1]["loss"],
        "val_loss": records[-1]["val_loss"],
        "seconds": sum(line["seconds"] for line in records),
        "median_step_seconds": 0.1,
        "examples_per_second": 320.0,
        "bytes_sent_per_step": sent,
        "bytes_full_sync_per_step": FULL,
        "reduction": FULL / sent if sent else None,
        "replicas_equal": True,
        "fingerprint": "c51bd19f3223200d",
    }
    if levels:
        shares = [{"bytes_sent_per_step": count, "reduction": FULL / count} for _, count in levels]
        tiers = [
            {"axis": axis, "scheme": scheme, "bytes_full_sync_per_step": FULL} for axis, _ in levels
        ]
        defaults["levels"] = [tier | share for tier, share in zip(tiers, shares, strict=True)]
    (path / "summary.json").write_text(json.dumps(defaults | summary))
    return path


def record(step, sent, steps):
    """One line of the metrics: a loss that falls from 5 towards 2, and 0.1 s per step."""
    loss = 2 + 3 * math.exp(-step / 8) + 0.05 * math.sin(7 * step)
    line = {
        "step": step,
        "loss": loss,
        "lr": 0.001,
        "seconds": 0.1,
        "bytes_sent": sent,
        "waited_s": 0.01,
        "step_s": 0.02,
    }
    return line | ({"val_loss": loss + 0.1} if step % 10 == 0 or step == steps else {})
