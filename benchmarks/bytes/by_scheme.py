"""Bytes that one replica sends per parameter and step, by arithmetic, for a large model.

python -m benchmarks.bytes.by_scheme
"""

import argparse

import detonation as dt
from detonation.core.schemes import traffic

SCHEMES = [
    dt.full(),
    dt.loco(),
    dt.loco("sign"),
    dt.demo(),
    dt.demo(precision="bf16"),
    dt.demo(precision="sign"),
    dt.demo(topk=1, precision="sign"),
    dt.demo(topk=32, tiles=True),
    dt.demo(topk=32, tiles=True, precision="sign"),
    dt.schemes.random(),
    dt.random_sign(rate=1 / 4),
    dt.random_sign(rate=1 / 8),
    dt.schemes.striding(),
    dt.diloco(),
    dt.schemes.local_sgd(),
    dt.schemes.streaming_diloco(fragments=1),
    dt.muloco(),
    dt.schemes.sparta(),
    dt.schemes.sparseloco(),
    dt.schemes.sparseloco(every=30),
]
SHAPE = (4096, 4096)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print("| scheme | 2 replicas | 8 replicas | 64 replicas |")
    print("|---|---|---|---|")
    for scheme in SCHEMES:
        defaults = dt.scheme(scheme.name).arguments
        changed = ", ".join(f"{k}={v}" for k, v in scheme.arguments.items() if v != defaults[k])
        layout = scheme.codec.layout({"weight": SHAPE})
        cells, steps = [], range(scheme.round.every, 2 * scheme.round.every)
        for replicas in (2, 8, 64):
            sent = (
                sum(traffic.bytes_sent(scheme, layout, replicas, step) for step in steps)
                / scheme.round.every
            )
            cells.append(f"{sent / layout.numel:.4f}")
        print(f"| {scheme.name}({changed}) | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
