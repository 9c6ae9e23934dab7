"""The views that all ranks have of one checkpoint, and the reason why it cannot be loaded by all.

Nodes may share a file system or have one each; nothing here asks which. Ranks see the same checkpoint where their
manifests have the same content, and the same files where the manifest is the same file.
"""

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from detonation.checkpoint.files import retention
from detonation.checkpoint.files.manifest import (
    MANIFEST_NAME,
    CorruptCheckpoint,
    Manifest,
    file_name,
    manifest_bytes,
    parse_manifest,
)
from detonation.checkpoint.files.shard_file import shard_fault
from detonation.checkpoint.volumes import ranges
from detonation.core.link.coordinates import Coordinates
from detonation.core.link.elastic_communicator import TextExchange


@dataclass(frozen=True)
class View:
    """One rank's view.

    host: the name of its machine. digest: of the manifest. file: the identity of the manifest's file, the same for all
    ranks that share it. fault: of the manifest, or of a file that this rank checks. lacks: replicas of which this rank
    needs a file that is not there. has: replicas of which all files are there.
    """

    host: str
    digest: str
    file: str
    fault: str = ""
    lacks: Sequence[int] = ()
    has: Sequence[int] = ()


def candidates(directory: Path, texts: TextExchange) -> list[str]:
    """The names of the checkpoints that any rank sees in its `directory`, newest first. Collective."""
    mine = json.dumps([path.name for path in retention.saved_checkpoints(directory)])
    names = {Path(name) for text in set(texts.gather(mine)) for name in json.loads(text)}
    return [path.name for path in retention.newest_first(names)]


def inspect(directory: Path, name: str, own: Coordinates, texts: TextExchange) -> tuple[Path, Manifest | None, str]:
    """This rank's path of the checkpoint `name`, its manifest, and the reason why not all ranks can load it.

    Collective. The path may be that of the final name where another rank still has the partial one.
    """
    path = retention.committed(directory, name)
    manifest, view = _manifest(path)
    views = _gathered(view, texts)
    if reason := _disagreement(views) or (manifest is not None and _misnamed(path, manifest)):
        return path, None, reason
    assert manifest is not None
    beside = [rank for rank, other in enumerate(views) if other.file == view.file]
    view = _files(path, manifest, own, beside, texts.rank)
    views = _gathered(view, texts)
    return path, manifest, _absence(views, manifest, own) or next((v.fault for v in views if v.fault), "")


def _gathered(view: View, texts: TextExchange) -> list[View]:
    return [View(**json.loads(text)) for text in texts.gather(json.dumps(asdict(view)))]


def _manifest(path: Path) -> tuple[Manifest | None, View]:
    try:
        content = manifest_bytes(path)
        status = (path / MANIFEST_NAME).stat()
        digest, file = hashlib.sha256(content).hexdigest(), f"{status.st_ino} {status.st_ctime_ns}"
        return parse_manifest(content), View(platform.node(), digest, file)
    except (CorruptCheckpoint, OSError) as error:
        return None, View(platform.node(), "", "", str(error))


def _disagreement(views: Sequence[View]) -> str:
    """The reason why ranks do not see the same whole manifest; "" where they do."""
    first = views[0]
    if all(view.fault for view in views):
        return first.fault
    if faulty := [rank for rank, view in enumerate(views) if view.fault]:
        return f"{views[faulty[0]].fault} {_where(faulty, views)}"
    if other := [rank for rank, view in enumerate(views) if view.digest != first.digest]:
        return f"{MANIFEST_NAME} {_where(other, views)} is not that of rank 0 on {first.host}"
    return ""


def _misnamed(path: Path, manifest: Manifest) -> str:
    return "" if retention.step_of(path) == manifest.step else f"its name is not that of step {manifest.step}"


def _files(path: Path, manifest: Manifest, own: Coordinates, beside: Sequence[int], rank: int) -> View:
    """Checks the files that this rank reads. Where it reads all, it shares the work with the ranks `beside` it."""
    present = {file.name for file in path.glob("*.safetensors")}
    replicas, shards = range(manifest.replicas), range(manifest.shards)
    has = [r for r in replicas if all(file_name(r, shard) in present for shard in shards)]
    if (manifest.replicas, manifest.shards) == (own.replicas, own.shards):
        checked = [file_name(own.replica, own.shard)]
        lacks = [] if checked[0] in present else [own.replica]
    else:
        checked = list(manifest.files)[beside.index(rank) :: len(beside)]
        lacks = [replica for replica in replicas if replica not in has]
    faults = [fault for name in checked if (fault := shard_fault(path / name, manifest.files[name]))]
    return View(platform.node(), "", "", faults[0] if faults else "", lacks, has)


def _absence(views: Sequence[View], manifest: Manifest, own: Coordinates) -> str:
    """The replicas whose files are on other nodes than on those that need them, with the remedy; "" for none.

    Where all ranks see the same files, a file that is missing is a fault like any other.
    """
    if not manifest.volumes and all(view.has == views[0].has for view in views):
        return ""
    texts = []
    for replica in sorted({replica for view in views for replica in view.lacks}):
        need = [rank for rank, view in enumerate(views) if replica in view.lacks]
        have = [rank for rank, view in enumerate(views) if replica in view.has]
        there = f"only {_where(have, views)}" if have else "on no node"
        texts.append(f"replica {replica} is needed {_where(need, views)}, and is {there}")
    if not texts:
        return ""
    if (manifest.replicas, manifest.shards) == (own.replicas, own.shards):
        remedy = "start the nodes in the order that saved it, or copy its files"
    else:
        remedy = f"to go on as {own.replicas} x {own.shards} copy the files of all replicas to each node"
    return f"{'; '.join(texts[:4])}: {remedy}"


def _where(ranks: Sequence[int], views: Sequence[View]) -> str:
    hosts = ", ".join(dict.fromkeys(views[rank].host for rank in ranks))
    return f"on {hosts} (rank{'s' * (len(ranks) > 1)} {ranges(ranks)})"
