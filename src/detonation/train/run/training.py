"""Trains to the end of the run or to a stop; writes records, checkpoints and the summary."""

from pathlib import Path

from detonation.checkpoint.async_save import Checkpoints
from detonation.checkpoint.files.retention import saved_checkpoints, step_of
from detonation.cluster.processes.signals import Stop
from detonation.cluster.survive.agreement import ReplicaLeft
from detonation.train.loop.checkpoints import save_async, save_now
from detonation.train.loop.fit import NonFiniteLoss, Stopped, fit
from detonation.train.loop.session import Session
from detonation.train.loop.summary import summarise
from detonation.train.output import directory, metrics
from detonation.train.recipe.schema import Table
from detonation.train.run.elastic_run import Losses
from detonation.train.run.recorder import Recorder, Recording


def train_until_end(
    session: Session,
    path: Path,
    recorder: Recorder,
    run: str,
    done: int,
    stop_after: int | None,
    stop: Stop,
    losses: Losses,
) -> Table:
    """Trains to the end of the run or to step `stop_after`; returns the result of `train_on_rank`.

    Args:
        run: Name of the feeds that publish the weights.
        done: Steps of earlier starts.
    """
    recording = Recording(session, path, run)
    steps = session.config.train.steps
    until = max(done, min(steps, stop_after or steps))
    kept = path / directory.CHECKPOINTS
    checkpoints = Checkpoints(kept, session.model, session.optimizer, session.config.train.keep)

    def save() -> Path:
        recorder.sync()
        return save_now(session, checkpoints, recorder.before)

    def after_step(record: metrics.Record) -> None:
        recorder.warn(losses.news(path, recorder))
        recorder.add(record)
        recorder.warn(recording.after_step())
        recorder.warn(checkpoints.news())
        every = session.config.train.checkpoint_every
        if every and record.step % every == 0 and record.step < until:
            recorder.sync()
            save_async(session, checkpoints, recorder.before)
            recording.saved(record.step)

    losses.set_up.done()
    try:
        try:
            fit(session, done, until, after_step, stop)
        finally:
            recording.log.close()
        recording.close(ended=until == steps)
    except NonFiniteLoss as error:
        recorder.sync()
        raise NonFiniteLoss(_saved_after(error, session, checkpoints, recorder)) from error
    except ReplicaLeft:  # only this replica leaves the run: the other replicas save and continue
        return {
            "stopped_after": session.optimizer.step_count,
            "stopped_by": "SIGTERM",
            "left": True,
            "directory": str(path),
        }
    except Stopped as stopped:
        save()
        return {
            "stopped_after": stopped.after,
            "stopped_by": stopped.signal,
            "directory": str(path),
        }
    save()
    recorder.warn(checkpoints.news())
    if until < steps:
        return {"stopped_after": until, "stopped_by": "--stop-after", "directory": str(path)}
    recorder.warn(losses.news(path, recorder))
    summary = summarise(session, recorder.records, recorder.before) | losses.table()
    if session.rank == 0:
        directory.write_json(path / directory.SUMMARY, summary)
    return {**summary, "directory": str(path)}


def _saved_after(
    error: NonFiniteLoss, session: Session, checkpoints: Checkpoints, recorder: Recorder
) -> str:
    """Saves the state that a loss which is not finite has left. Returns the message of the error,
    with the path of this state and how to go on. Collective.

    If a resumed run would compute the same loss again, this state is not saved among the
    checkpoints: it would be the newest of them, and push out an earlier, better one.
    """
    step = session.optimizer.step_count
    if not error.repeats:
        saved = save_now(session, checkpoints, recorder.before)
        return f"{error}; the state after step {step} is saved in {saved}"
    checkpoints.close()
    earlier = saved_checkpoints(checkpoints.directory)
    aside = checkpoints.directory.with_name(directory.DIVERGED)
    with Checkpoints(aside, session.model, session.optimizer, keep=1) as diverged:
        saved = save_now(session, diverged, recorder.before)
    text = f"{error}; the state after step {step} is saved in {saved}"
    if not earlier:
        return text
    if step_of(earlier[0]) < step:
        return f"{text}; --resume goes on from {earlier[0]}"
    return f"{text}; remove {earlier[0]} before --resume, because it leads to this loss"
