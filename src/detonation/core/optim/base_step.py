"""The step of the base optimizer, which all replicas make or none."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol
from weakref import WeakSet, finalize, ref

from torch import Tensor
from torch.optim import Optimizer

from detonation.core.flat.tensors import local, padding_row
from detonation.plugins import plugin


class Clipping(Protocol):
    """Scales the gradients before a step."""

    norm: Tensor | None

    def __call__(self) -> None: ...


class BaseStep:
    """Steps a base optimizer on the agreed gradients. Raises if other code steps it.

    Attributes: clip: Called before each step, if set; see `Clip`. overflow: What a GradScaler found
        in gradients that no agreed update replaces. If it is nonzero, the step is skipped.
        rounding: Context manager of each step.

    Args:
        optimizer: The base optimizer. It gets a hook that checks each of its steps.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.clip: Clipping | None = None
        self.overflow: Tensor | None = None
        self.rounding: AbstractContextManager[object] = nullcontext()
        self._held: dict[int, tuple[Tensor, int]] = {}
        self._hook: Callable[[], object] | None = None  # removes the hook for held rows
        self._lookout = _lookout_of(optimizer)
        self._lookout.users.add(self)

    def __call__(self, clips: bool = True) -> None:
        """Clips, if `clips` is True and a clip is set, and steps."""
        if self.overflow is not None and bool(self.overflow):
            return
        if self.clip and clips:
            self.clip()
        self._lookout.is_away = True
        try:
            with self.rounding:
                self.optimizer.step()
        finally:
            self._lookout.is_away = False

    @property
    def rounds_singly(self) -> bool:
        """True if steps have the same bits on all kinds of processors, at lower speed."""
        return not isinstance(self.rounding, nullcontext)

    def round_singly(self, on: bool = True) -> None:
        """With `on`, rounds every operation of a step separately from now on; else steps as torch
        does.
        """
        self.rounding = nullcontext()
        if on:
            self.rounding = plugin("gates", "single rounding")()

    def hold(self, parameters: Iterable[Tensor]) -> None:
        """Keeps the padding rows of `parameters` unchanged from now on, by setting their updates to
        zero.
        """
        found = {id(p): (p, row) for p in parameters if (row := padding_row(p)) is not None}
        if found and self._hook is None:
            self._hook = _hook_before(self.optimizer, self)
        self._held |= found

    def release(self, parameter: Tensor) -> None:
        """Updates every row of `parameter` from now on."""
        self._held.pop(id(parameter), None)
        if self._hook is not None and not self._held:
            self._hook()
            self._hook = None

    def zero_held_rows(self) -> None:
        """Sets the updates of the held rows to zero."""
        for parameter, row in self._held.values():
            if parameter.grad is not None:
                local(parameter.grad)[row].zero_()


def _hook_before(optimizer: Optimizer, step: BaseStep) -> Callable[[], object]:
    """Lets `step` zero held rows before each step of `optimizer`; returns a function that removes
    the hook.

    The hook does not keep `step` alive, and is removed with it.
    """
    reference = ref(step)

    def hold(*_: object) -> None:
        if (alive := reference()) is not None:
            alive.zero_held_rows()

    return finalize(step, optimizer.register_step_pre_hook(hold).remove)


def hooks_of(optimizer: Optimizer) -> list[str]:
    """Names of the step hooks that other code registered on `optimizer`."""
    hooks = [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
    ]
    others = [hook for hook in hooks if not str(hook.__module__).startswith("detonation.")]
    return [getattr(hook, "__qualname__", type(hook).__name__) for hook in others]


class _Lookout:
    """A hook that runs after each step of an optimizer. It raises for a step outside of a
    `BaseStep`, which would change only this replica.

    It is no pre-step hook, because `Update.apply` skips writing gradients only if there is none.

    Attributes: is_away: True during a step of a `BaseStep`.
    """

    def __init__(self) -> None:
        self.users: WeakSet[BaseStep] = WeakSet()
        self.is_away = False

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # torch's state-dict helpers step with lr 0 to create state
        moves = any(group.get("lr", 1) != 0 for group in optimizer.param_groups)
        if self.users and moves and not self.is_away:
            raise RuntimeError(
                f"the {type(optimizer).__name__} inside was stepped, which moves this replica"
                " alone: call step() of the optimizer that detonation.replicate returned"
            )


def _lookout_of(optimizer: Optimizer) -> _Lookout:
    """The hook of `optimizer`, created once."""
    for hook in optimizer._optimizer_step_post_hooks.values():
        if isinstance(hook, _Lookout):
            return hook
    lookout = _Lookout()
    optimizer.register_step_post_hook(lookout)
    return lookout
